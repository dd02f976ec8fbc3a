//! Which steps are captured, and which of them give way to others.

use std::collections::HashMap;
use std::fmt;

/// Requests, and pages of each.
pub(crate) type Bucket = (usize, usize);

/// Captured steps that are kept at a time: those of a batch that grows and shrinks, with short requests and long ones.
pub(crate) const MAX_GRAPHS: usize = 16;

/// Graphs by the sizes of their steps.
pub(super) struct Buckets<G> {
    most: usize,
    known: HashMap<Bucket, Known<G>>,
    /// Counts the uses.
    clock: u64,
}

struct Known<G> {
    /// `None` where the step cannot be captured: another try would not do better.
    graph: Option<G>,
    used: u64,
}

impl<G> Buckets<G> {
    /// For so many graphs.
    pub(super) fn new(most: usize) -> Self {
        Self { most, known: HashMap::new(), clock: 0 }
    }

    /// Whether a capture was tried.
    pub(super) fn is_known(&self, bucket: Bucket) -> bool {
        self.known.contains_key(&bucket)
    }

    /// Graphs there are.
    pub(super) fn captured(&self) -> usize {
        self.known.values().filter(|known| known.graph.is_some()).count()
    }

    /// Sizes whose steps cannot be captured, as a try has shown.
    pub(super) fn uncaptured(&self) -> usize {
        self.known.len() - self.captured()
    }

    /// Drops those that were not used for the longest time, until one more may come: before it is captured, for it to have their
    /// memory.
    pub(super) fn make_room(&mut self) {
        while self.captured() >= self.most {
            let captured = self.known.iter().filter(|(_, known)| known.graph.is_some());
            match captured.min_by_key(|(_, known)| known.used).map(|(&bucket, _)| bucket) {
                Some(oldest) => drop(self.known.remove(&oldest)),
                None => return,
            }
        }
    }

    /// The graph of a bucket, or that there is none.
    pub(super) fn insert(&mut self, bucket: Bucket, graph: Option<G>) {
        self.clock += 1;
        self.known.insert(bucket, Known { graph, used: self.clock });
    }

    pub(super) fn get(&self, bucket: Bucket) -> Option<&G> {
        self.known.get(&bucket)?.graph.as_ref()
    }

    /// The graph of a bucket, which is used now.
    pub(super) fn use_mut(&mut self, bucket: Bucket) -> Option<&mut G> {
        let known = self.known.get_mut(&bucket)?;
        self.clock += 1;
        known.used = self.clock;
        known.graph.as_mut()
    }

    /// Drops the graphs that `keep` does not name.
    pub(super) fn retain(&mut self, keep: impl Fn(&G) -> bool) {
        self.known.retain(|_, known| known.graph.as_ref().is_none_or(&keep));
    }

    pub(super) fn clear(&mut self) {
        self.known.clear();
    }
}

impl<G> fmt::Debug for Buckets<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.known.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured<G>(buckets: &Buckets<G>) -> Vec<Bucket> {
        let mut captured: Vec<Bucket> =
            buckets.known.iter().filter(|(_, known)| known.graph.is_some()).map(|(&bucket, _)| bucket).collect();
        captured.sort_unstable();
        captured
    }

    #[test]
    fn the_longest_unused_graph_makes_room() {
        let mut buckets = Buckets::new(2);
        for bucket in [(1, 1), (2, 1)] {
            buckets.make_room();
            buckets.insert(bucket, Some(7));
        }
        // A step that cannot be captured takes no room.
        buckets.make_room();
        assert_eq!(buckets.captured(), 1);
        buckets.insert((4, 1), None);
        buckets.make_room();
        buckets.insert((8, 1), Some(8));
        assert_eq!((captured(&buckets), buckets.uncaptured()), (vec![(2, 1), (8, 1)], 1));
        assert!(buckets.is_known((4, 1)) && buckets.use_mut((4, 1)).is_none() && !buckets.is_known((1, 1)));
        assert_eq!(buckets.use_mut((2, 1)), Some(&mut 7));
        buckets.make_room();
        assert_eq!(captured(&buckets), [(2, 1)]);
        // One that has lost its buffers.
        buckets.insert((2, 1), None);
        assert_eq!((buckets.captured(), buckets.get((2, 1))), (0, None));
        buckets.insert((8, 1), Some(8));
        buckets.retain(|graph| *graph != 8);
        assert!(!buckets.is_known((8, 1)) && buckets.is_known((2, 1)));
    }

    #[test]
    fn there_are_never_more_than_the_bound() {
        let mut buckets = Buckets::new(MAX_GRAPHS);
        for batch in 0..100 {
            buckets.make_room();
            buckets.insert((batch, 1), Some(batch));
            assert!(buckets.captured() <= MAX_GRAPHS);
        }
        assert_eq!(captured(&buckets), (84..100).map(|batch| (batch, 1)).collect::<Vec<_>>());
    }
}
