//! How many keys are cut into chunks, from which candidates are chosen.

use super::top_k::LOAD;

/// Keys of a chunk at least: fewer make no cube faster.
const MIN_CHUNK: usize = 4096;
/// A chunk has so many times `k` keys at least: fewer would leave too much for the next level, and candidates with their
/// positions have room where ranks were.
const REDUCTION: usize = 4;

/// How the keys of a query token are cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Keys of a chunk on all levels but the last, which has one chunk.
    pub chunk: usize,
    /// Keys of a query token at most, on each level: all; then the best `k` of each chunk of the level before.
    pub lens: Vec<usize>,
}

impl Plan {
    /// For at most `len` keys, of which a cube can hold `capacity`, where `cubes` cubes for a query token work at a time.
    ///
    /// What a cube can hold it takes: a second launch costs as much as it saves. More keys are cut up such that both levels
    /// have the same number of keys in a cube, as far as there are multiprocessors for the chunks.
    pub fn of(len: usize, k: usize, capacity: usize, cubes: usize) -> Self {
        let least = MIN_CHUNK.max(k.saturating_mul(REDUCTION));
        let mut lens = vec![len];
        if least > capacity {
            return Self { chunk: capacity, lens };
        }
        let even = len.saturating_mul(k).isqrt().max(len.div_ceil(cubes.max(1)));
        let chunk = even.clamp(least, capacity).next_multiple_of(LOAD);
        let mut left = len;
        while left > capacity {
            left = left / chunk * k + (left % chunk).min(k);
            lens.push(left);
        }
        Self { chunk, lens }
    }

    /// Numbers that the candidates of a query token take: ranks and positions.
    pub fn candidate_stride(&self) -> usize {
        self.lens.get(1).map_or(0, |len| 2 * len.next_multiple_of(LOAD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one cube holds is not cut up, nor what could not be made fewer.
    #[test]
    fn one_level() {
        for (len, k) in [(0, 1), (1, 1), (32768, 2048), (32769, 8193), (1 << 30, 1 << 20)] {
            assert_eq!(Plan::of(len, k, 32768, 132).lens, [len], "{k} of {len}");
        }
    }

    #[test]
    fn chunks_for_the_multiprocessors_that_are_free() {
        let plan = |cubes| Plan::of(131_072, 2048, 32768, cubes);
        assert_eq!(plan(132), Plan { chunk: 16384, lens: vec![131_072, 16384] });
        assert_eq!(plan(4), Plan { chunk: 32768, lens: vec![131_072, 8192] });
        assert_eq!(plan(0), Plan { chunk: 32768, lens: vec![131_072, 8192] });
    }

    /// Chunks are whole loads, every level leaves fewer, the last one fits into a cube, and candidates fit where ranks were.
    #[test]
    fn any_plan() {
        for len in (8193..3_000_000).step_by(77_777) {
            for k in [1, 2, 3, 40, 511, 2048] {
                for (capacity, cubes) in [(8192, 0), (8192, 16), (32768, 3), (32768, 132)] {
                    let plan = Plan::of(len, k, capacity, cubes);
                    assert!(plan.chunk <= capacity && plan.chunk.is_multiple_of(LOAD), "{plan:?}");
                    assert!(plan.lens.is_sorted_by(|before, after| before > after), "{plan:?}");
                    assert!(plan.lens.last().is_some_and(|&len| len <= capacity), "{plan:?}");
                    assert!(plan.candidate_stride() <= len, "{plan:?}");
                }
            }
        }
    }
}
