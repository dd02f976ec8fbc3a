//! The units of a multiprocessor beside its warps: shared memory, the way to L2, tensor cores.
use super::step::UNITS;
use std::collections::{HashSet, VecDeque};

/// One of the four parts of a multiprocessor.
#[derive(Default, Clone)]
pub(super) struct Part {
    pub issue: f64,
    pub units: [f64; UNITS],
    pub tensor_memory: f64,
}

/// A product of a warpgroup: when it was issued, how long it takes, and what it reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub issued: f64,
    pub cycles: f64,
    pub bytes: f64,
}

/// A multiprocessor, which a CTA has for itself.
#[derive(Default)]
pub(super) struct Multiprocessor {
    pub parts: [Part; 4],
    /// From when on shared memory, the loads from L2 and the stores to it are free.
    pub shared: f64,
    pub loads: f64,
    pub stores: f64,
    /// From when on the tensor cores are free of `tcgen05` products.
    pub tensor: f64,
    /// Products that wait, of each warpgroup, the one that runs with its end, and whose turn it is.
    pub queues: Vec<VecDeque<Product>>,
    pub running: Option<(f64, usize)>,
    pub turn: usize,
    /// Lines that it has loaded.
    pub lines: HashSet<u64>,
}

impl Multiprocessor {
    /// When the running product ends or the next begins.
    pub fn next_product(&self) -> Option<f64> {
        let begins = || self.queues.iter().filter_map(|queue| queue.front().map(|p| p.issued)).min_by(f64::total_cmp);
        self.running.map_or_else(begins, |(end, _)| Some(end))
    }
}
