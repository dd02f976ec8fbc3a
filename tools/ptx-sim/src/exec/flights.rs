//! Work that is under way beside the warps: copies and matrix operations whose results come later.
//!
//! The scheduler does it at random times, a wait for it does it at the latest. Operations without a common queue are
//! done in any order (PTX ISA, "Asynchronous operations").
use super::order::Stamp;

/// The instruction that runs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Origin {
    /// The warp, counted through the cluster.
    pub warp: usize,
    pub lanes: u32,
    pub pc: u32,
}

/// Work that is under way.
pub(super) struct Flight<W> {
    id: u64,
    pub from: Origin,
    /// CTAs whose shared memory it uses, a bit for each: they must not end before.
    ctas: u32,
    /// Those of one queue are done in the order in which they were issued.
    queue: Option<u64>,
    /// When it is over, where time is estimated.
    due: f64,
    pub work: W,
}

/// A copy that uses the shared memory of CTAs, as far as no warp that has exited knows of its end.
struct Open {
    stamp: Stamp,
    rank: usize,
    from: Origin,
}

/// All work that is under way.
pub(super) struct Flights<W> {
    flights: Vec<Flight<W>>,
    next: u64,
    open: Vec<Open>,
}

impl<W> Default for Flights<W> {
    fn default() -> Self {
        Self { flights: Vec::new(), next: 0, open: Vec::new() }
    }
}

impl<W> Flights<W> {
    /// Adds work; its number.
    pub fn add(&mut self, from: Origin, (ctas, queue): (u32, Option<u64>), due: f64, work: W) -> u64 {
        let id = self.next;
        self.next += 1;
        self.flights.push(Flight { id, from, ctas, queue, due, work });
        id
    }

    /// The place of the flight of this number, and when it is over.
    pub fn find(&self, id: u64) -> Option<(usize, f64)> {
        self.flights.iter().position(|f| f.id == id).map(|index| (index, self.flights[index].due))
    }

    /// When the flight at a place is over.
    pub fn due(&self, index: usize) -> f64 {
        self.flights[index].due
    }

    /// A copy uses the shared memory of a CTA until what is stamped is known to be over.
    pub fn open(&mut self, stamp: Stamp, rank: usize, from: Origin) {
        self.open.push(Open { stamp, rank, from });
    }

    pub fn len(&self) -> usize {
        self.flights.len()
    }

    pub fn is_under_way(&self, id: u64) -> bool {
        self.flights.iter().any(|f| f.id == id)
    }

    /// The one that is over first, and when.
    pub fn first(&self) -> Option<(usize, f64)> {
        let all = self.flights.iter().enumerate().map(|(index, flight)| (index, flight.due));
        all.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// It has read its shared memory: the CTA may end.
    pub fn leave_shared(&mut self, id: u64) {
        self.flights.iter_mut().filter(|f| f.id == id).for_each(|f| f.ctas = 0);
    }

    /// A warp of a CTA exits: what it has seen is over before the CTA's end.
    pub fn seen(&mut self, rank: usize, seen: impl Fn(Stamp) -> bool) {
        self.open.retain(|copy| copy.rank != rank || !seen(copy.stamp));
    }

    /// Work that uses a CTA's shared memory when its last warp exits, or may do so: no warp has waited for it.
    pub fn using(&self, rank: usize) -> Option<Origin> {
        let under_way = self.flights.iter().find(|f| f.ctas >> rank & 1 == 1).map(|f| f.from);
        under_way.or_else(|| self.open.iter().find(|copy| copy.rank == rank).map(|copy| copy.from))
    }

    /// Takes out a flight, or the one that must be done before it.
    pub fn take(&mut self, index: usize) -> Flight<W> {
        let queue = self.flights[index].queue;
        let first = queue.and_then(|q| self.flights.iter().position(|f| f.queue == Some(q)));
        self.flights.remove(first.unwrap_or(index))
    }
}
