//! What copies and products take of the units of a multiprocessor.
use super::Time;
use super::units::Product;
use crate::ir::{AsyncProduct, SourceA};

impl Time<'_> {
    /// Takes shared memory for some bytes, from now on or as soon as it is free: the end.
    pub(super) fn shared(&mut self, cta: usize, from: f64, bytes: f64) -> f64 {
        let cycles = bytes / self.rates().shared_bytes;
        self.used.shared += cycles;
        let shared = &mut self.multiprocessors[cta].shared;
        *shared = shared.max(from) + cycles;
        *shared
    }

    /// Takes the way from L2 for some bytes: the end.
    pub(super) fn load(&mut self, cta: usize, bytes: f64) -> f64 {
        self.used.loaded += bytes;
        let loads = &mut self.multiprocessors[cta].loads;
        *loads = loads.max(self.now) + bytes / self.plan.rates.load_bytes;
        *loads
    }

    /// The way to L2, likewise.
    pub(super) fn store(&mut self, cta: usize, bytes: f64) -> f64 {
        self.used.stored += bytes;
        let stores = &mut self.multiprocessors[cta].stores;
        *stores = stores.max(self.now) + bytes / self.plan.rates.store_bytes;
        *stores
    }

    /// A bulk copy from global memory begins.
    pub fn bulk_load(&mut self, cta: usize, bytes: u64) {
        let latency = &self.plan.rates.latency;
        self.due = self.load(cta, bytes as f64) + latency.memory + latency.bulk;
    }

    /// A bulk copy to global memory begins.
    pub fn bulk_store(&mut self, cta: usize, bytes: u64) {
        let read = self.shared(cta, self.now, bytes as f64);
        let latency = &self.plan.rates.latency;
        self.due = self.store(cta, bytes as f64).max(read) + latency.l2 + latency.bulk;
    }

    /// Bytes of a copy come to shared memory.
    pub fn land(&mut self, cta: usize, bytes: u64) {
        self.shared(cta, self.now, bytes as f64);
    }

    /// All warps of a warpgroup have issued a product.
    pub fn product(&mut self, warpgroup: usize, op: &AsyncProduct) {
        let groups = self.multiprocessors[0].queues.len();
        let (shape, bytes) = (op.shape, op.a_elem.bits() as f64 / 8.0);
        let a = if matches!(op.a, SourceA::Shared(..)) { shape.m } else { 0 };
        let product = Product {
            issued: self.now,
            cycles: (shape.m * shape.n * shape.k) as f64 * bytes / 2.0 / self.rates().products,
            bytes: ((a + shape.n) * shape.k) as f64 * bytes,
        };
        self.multiprocessors[warpgroup / groups].queues[warpgroup % groups].push_back(product);
    }

    /// Whether a warpgroup's products are over, up to this one.
    pub fn has_done(&self, warpgroup: usize, products: u64) -> bool {
        self.done[warpgroup] >= products
    }

    /// The tensor cores begin or end a product.
    pub fn tensor(&mut self, cta: usize) {
        let groups = self.multiprocessors[cta].queues.len();
        let at = self.multiprocessors[cta].next_product().unwrap_or(self.now);
        self.now = self.now.max(at);
        if let Some((_, group)) = self.multiprocessors[cta].running.take() {
            self.done[cta * groups + group] += 1;
            return;
        }
        let turn = self.multiprocessors[cta].turn;
        let waits = |group: &usize| self.multiprocessors[cta].queues[*group].front().is_some_and(|p| p.issued <= at);
        let Some(group) = (turn..turn + groups).map(|group| group % groups).find(waits) else { return };
        let Some(product) = self.multiprocessors[cta].queues[group].pop_front() else { return };
        let read = self.shared(cta, self.now, product.bytes);
        self.used.tensor += product.cycles;
        let end = read.max(self.now + product.cycles);
        self.multiprocessors[cta].running = Some((end, group));
        self.multiprocessors[cta].turn = group + 1;
    }

    /// A `tcgen05` product of some CTAs: rows of each, columns, terms, and bytes of shared memory that each reads.
    pub fn tensor_product(&mut self, ctas: &[usize], (m, n, k): (u32, u32, u32), bytes: u64) {
        let full = self.rates().product_rows;
        // Few rows leave a part of the tensor cores idle; a pair spreads its columns over all lanes.
        let rows = if ctas.len() > 1 { full.min(f64::from(m) * 2.0) } else { full.min(f64::from(m)) };
        let cycles = f64::from(m * n * k) / self.rates().products * full / rows;
        let start = ctas.iter().map(|cta| self.multiprocessors[*cta].tensor).fold(self.now, f64::max);
        let read = ctas.iter().map(|cta| self.shared(*cta, start, bytes as f64)).fold(0.0, f64::max);
        for cta in ctas {
            self.multiprocessors[*cta].tensor = read.max(start + cycles);
        }
        self.used.tensor += cycles * ctas.len() as f64;
        self.due = read.max(start + cycles);
    }

    /// A commit of what a CTA's tensor cores have been given.
    pub fn tensor_commit(&mut self, cta: usize) {
        self.due = self.multiprocessors[cta].tensor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::time::Plan;
    use crate::timing::B200;
    use rstest::rstest;

    /// 4096 multiply-adds in a cycle for 128 rows, and for a pair with 64 each; half for 64 rows of one CTA. Or 128 bytes.
    #[rstest]
    #[case(&[0], (128, 256, 16), 0, 128.0)]
    #[case(&[0], (64, 256, 16), 0, 128.0)]
    #[case(&[0, 1], (128, 256, 16), 0, 128.0)]
    #[case(&[0, 1], (64, 256, 16), 0, 64.0)]
    #[case(&[0, 1], (64, 64, 16), 4096, 32.0)]
    fn tcgen05_products_one_after_the_other(
        #[case] ctas: &[usize],
        #[case] shape: (u32, u32, u32),
        #[case] bytes: u64,
        #[case] cycles: f64,
    ) {
        let plan = Plan { rates: &B200, steps: Vec::new() };
        let mut time = Time::new(&plan, 2, &[]);
        for count in 1..=3 {
            time.tensor_product(ctas, shape, bytes);
            assert_eq!(time.due(), cycles * f64::from(count));
        }
        time.tensor_commit(ctas[0]);
        assert_eq!(time.due(), 3.0 * cycles);
    }
}
