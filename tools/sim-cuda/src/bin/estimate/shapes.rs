//! The shapes, and what a H200 takes for them.

/// Channels of a key and of a value.
pub const KEY: usize = 576;
pub const VALUE: usize = 512;

/// A decode step in bf16, keys of 576 channels and values of 512, pages of 64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    pub batch: usize,
    pub queries: usize,
    pub heads: usize,
    pub keys: usize,
    /// Microseconds, `kernels/src/mla_decode/sm90/README.md`.
    pub measured: f64,
    /// One of those that the estimate is judged by; chosen before there was one.
    pub judged: bool,
}

impl Shape {
    /// Query rows of a sequence.
    pub fn rows(&self) -> usize {
        self.queries * self.heads
    }
}

const fn shape(batch: usize, heads: usize, keys: usize, measured: f64) -> Shape {
    Shape { batch, queries: 1, heads, keys, measured, judged: false }
}

const fn judged(batch: usize, heads: usize, keys: usize, measured: f64) -> Shape {
    Shape { judged: true, ..shape(batch, heads, keys, measured) }
}

/// All of them.
pub const SHAPES: [Shape; 29] = [
    judged(128, 128, 4096, 247.4),
    shape(128, 128, 8192, 473.9),
    judged(128, 128, 16384, 997.5),
    Shape { queries: 2, ..shape(128, 128, 4096, 466.5) },
    judged(1, 128, 1024, 17.4),
    shape(1, 128, 4096, 20.6),
    shape(1, 128, 16384, 26.9),
    judged(1, 128, 65536, 48.5),
    shape(4, 128, 1024, 19.9),
    shape(4, 128, 4096, 26.1),
    shape(4, 128, 16384, 47.7),
    shape(4, 128, 65536, 137.6),
    shape(8, 128, 1024, 21.4),
    shape(8, 128, 4096, 33.0),
    judged(8, 128, 16384, 75.9),
    shape(8, 128, 65536, 246.2),
    shape(16, 128, 4096, 49.5),
    shape(16, 128, 16384, 138.0),
    shape(32, 128, 1024, 36.4),
    judged(32, 128, 4096, 79.6),
    shape(32, 128, 16384, 248.3),
    shape(32, 128, 65536, 921.5),
    shape(64, 128, 1024, 45.7),
    shape(64, 128, 4096, 132.6),
    shape(1, 64, 1024, 17.8),
    judged(4, 64, 4096, 24.7),
    shape(4, 64, 65536, 95.3),
    judged(8, 64, 65536, 165.8),
    shape(16, 64, 4096, 40.4),
];
