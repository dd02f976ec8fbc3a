//! `wgmma`: products that the four warps of a warpgroup start and that go on by themselves (PTX ISA 9.7.15).
//!
//! Registers of a product, those of D and of A, must not be touched until a `wgmma.wait_group` retires it, and a
//! `wgmma.fence` must stand between any access to them and the product; only products of one shape may follow each other
//! on the same D. What the four warps issue must be the same. Shared memory is read at a random time between the last
//! warp's issue and the first warp's wait.
//!
//! A wgmma-group is one of the warpgroup, but each warp waits for itself. After a warp's wait the reads of B are over, which
//! all warps share, and those of its own 16 rows of A in shared memory. Of the rows that other warps multiply it knows
//! nothing: who writes to A must be ordered after the waits of all four.
//!
//! Rows of A, or columns of B, that nothing wrote make their own rows or columns of D, and no others: these become NaN, so
//! that it shows where they are used. Kernels leave parts of a tile unwritten that they have no use for.
use super::descriptor::Tile;
use super::env::Env;
use super::fragment::{Fragment, Role};
use super::order::{Agent, Proxy};
use super::product::{Number, multiply};
use super::registers::{LaneResult, Registers};
use super::shared::{Shared, address_in};
use super::warp::{Flow, Wait, Warp, whole_warp};
use super::warpgroup::{Issue, Open, Operands, Register, Values, WARPS, error};
use crate::error::Fault;
use crate::ir::{AsyncProduct, Elem, Layout, MatrixOp, Shape, Slot, SourceA};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

fn fault(fault: Fault) -> (Fault, u32) {
    (fault, u32::MAX)
}

/// Runs an instruction of `wgmma`.
pub(super) fn run(warp: &mut Warp, env: &mut Env, group: u32, mask: u32, op: &MatrixOp) -> LaneResult<Flow> {
    if let Some(flow) = whole_warp(warp, group, mask)? {
        return Ok(flow);
    }
    let slots = warp.regs.slots();
    warp.products.registers.resize(slots, Register::default());
    let index = warp.index / WARPS;
    if env.warps < WARPS * (index + 1) {
        return Err(error("its warpgroup has fewer than four warps"));
    }
    match op {
        MatrixOp::Async(op) => issue(warp, env, op)?,
        MatrixOp::AsyncFence => warp.products.fence(),
        MatrixOp::AsyncCommit => {
            let group = std::mem::take(&mut warp.products.open);
            warp.products.groups.push_back(group);
            read_some(warp, env)?;
        }
        MatrixOp::AsyncWait { pending } => return wait(warp, env, *pending),
        other => return Err((Fault::UnknownInstruction(format!("{other:?}")), mask)),
    }
    Ok(Flow::Next)
}

/// The one value that a register must have in all lanes.
fn uniform(regs: &Registers, slot: Slot, what: &str) -> LaneResult<u64> {
    let row = regs.row(slot);
    if row.iter().any(|x| x != &row[0]) {
        return Err(error(format!("{what} differs between lanes")));
    }
    Ok(row[0])
}

fn issue(warp: &mut Warp, env: &mut Env, op: &AsyncProduct) -> LaneResult<()> {
    let accumulates = match warp.regs.pred(op.accumulate) {
        0 => false,
        u32::MAX => true,
        _ => return Err(error("scale-d differs between lanes")),
    };
    let a = match op.a {
        SourceA::Shared(slot, _) => Some(uniform(&warp.regs, slot, "the descriptor of A")?),
        SourceA::Registers(_) => None,
    };
    let descriptors = (a, uniform(&warp.regs, op.b, "the descriptor of B")?);
    let line = env.shared.order.line;
    warp.products.take_off(op, line)?;
    let order = &mut env.shared.order;
    let group = number(warp, env.warps);
    let warpgroup = &mut env.warpgroups[group];
    let at = (warp.products.issued - warpgroup.complete) as usize;
    if at == warpgroup.open.len() {
        let issue = Issue {
            op: op.clone(),
            line,
            descriptors,
            accumulates,
            agent: order.begin_async(warp.agent, Proxy::Async, "wgmma"),
            rows: OnceLock::new(),
            rank: warp.rank,
            unwritten: OnceLock::new(),
            values: OnceLock::new(),
            retired: AtomicUsize::new(0),
        };
        warpgroup.open.push_back(Open { issue: Arc::new(issue), warps: 0, rows: [None; WARPS] });
    } else {
        order.also_after(warpgroup.open[at].issue.agent, warp.agent);
    }
    let Open { issue, warps, rows } = &mut warpgroup.open[at];
    if (issue.line, issue.descriptors, issue.accumulates) != (line, descriptors, accumulates) {
        let theirs = format!("line {}, descriptors {:x?}", issue.line, issue.descriptors);
        return Err(error(format!("the warps of the warpgroup differ: {theirs} and line {line}, {descriptors:x?}")));
    }
    *warps += 1;
    rows[warp.index % WARPS] = a.map(|_| order.begin_async(warp.agent, Proxy::Async, "wgmma"));
    warp.products.open.push(issue.clone());
    warp.products.issued += 1;
    // Each warp issues in order, so that only the first can be complete.
    match warpgroup.open.pop_front_if(|open| open.warps == WARPS) {
        Some(open) => {
            warpgroup.complete += 1;
            if let Some(time) = &mut env.time {
                time.product(group, op);
            }
            open.start(&mut env.shared)
        }
        None => Ok(()),
    }
}

impl Open {
    /// All warps have issued it: it is ordered after all of them, and reads its tiles from now on.
    fn start(self, shared: &mut Shared) -> LaneResult<()> {
        let clock = shared.order.clock(self.issue.agent).clone();
        if let [Some(a), Some(b), Some(c), Some(d)] = self.rows {
            let rows = *self.issue.rows.get_or_init(|| [a, b, c, d]);
            rows.into_iter().for_each(|agent| shared.order.acquire(agent, &clock));
        }
        self.issue.claim(shared)
    }
}

/// The warp's warpgroup, counted through the cluster.
fn number(warp: &Warp, warps_of_cta: usize) -> usize {
    warp.rank * warps_of_cta.div_ceil(WARPS) + warp.index / WARPS
}

/// Some of the products that can start read their operands.
fn read_some(warp: &mut Warp, env: &mut Env) -> LaneResult<()> {
    let first = warp.products.issued - warp.products.groups.iter().map(|g| g.len() as u64).sum::<u64>();
    let issues: Vec<_> = warp.products.groups.iter().flatten().cloned().collect();
    for (issue, count) in issues.iter().zip(first..) {
        if env.warpgroups[number(warp, env.warps)].passed(count + 1) && env.random.below(2) == 0 {
            issue.read(env)?;
        }
    }
    Ok(())
}

/// Retires groups until `pending` are left, once all four warps have issued them.
fn wait(warp: &mut Warp, env: &mut Env, pending: usize) -> LaneResult<Flow> {
    let left = |groups: &VecDeque<Vec<Arc<Issue>>>| -> usize {
        groups.iter().skip(groups.len().saturating_sub(pending)).map(Vec::len).sum()
    };
    let products = &warp.products;
    let last = products.issued - (products.open.len() + left(&products.groups)) as u64;
    let warpgroup = number(warp, env.warps);
    if !env.has_products(warpgroup, last) {
        return Ok(Flow::Retry(Wait::Warpgroup { warpgroup, issued: last }));
    }
    while warp.products.groups.len() > pending {
        for issue in warp.products.groups.pop_front().into_iter().flatten() {
            issue.read(env)?;
            issue.finish(warp);
            let order = &mut env.shared.order;
            let clock = order.clock(issue.agent).clone();
            order.acquire(warp.agent, &clock);
            if let Some(rows) = issue.rows.get() {
                let clock = order.end_async(rows[warp.index % WARPS]);
                order.acquire(warp.agent, &clock);
            }
            if issue.retired.fetch_add(1, Ordering::Relaxed) + 1 == WARPS {
                order.end_async(issue.agent);
            }
            env.matrix_flops += 2 * (issue.op.shape.m * issue.op.shape.n * issue.op.shape.k / WARPS) as u64;
        }
    }
    Ok(Flow::Next)
}

impl Issue {
    /// Checks and notes that the product reads its tiles from now on.
    fn claim(&self, shared: &mut Shared) -> LaneResult<()> {
        let Shape { m, n, k } = self.op.shape;
        let mut unwritten = [BTreeSet::new(), BTreeSet::new()];
        if let (Some(descriptor), SourceA::Shared(_, transposed)) = (self.descriptors.0, &self.op.a) {
            let tile = Tile::of_wgmma(descriptor, *transposed).map_err(fault)?;
            let rows = self.rows.get().copied().unwrap_or([self.agent; WARPS]);
            let reader = |row: usize| rows[row * WARPS / m];
            self.claim_tile(shared, &tile, (self.op.a_elem, m, k), reader, &mut unwritten[0])?;
        }
        let tile = Tile::of_wgmma(self.descriptors.1, self.op.b_transposed).map_err(fault)?;
        self.claim_tile(shared, &tile, (self.op.b_elem, n, k), |_| self.agent, &mut unwritten[1])?;
        // It is claimed once.
        let _ = self.unwritten.set(unwritten);
        Ok(())
    }

    /// One of the tiles; `reader` is who reads a row of A or a column of B.
    fn claim_tile(
        &self,
        shared: &mut Shared,
        tile: &Tile,
        (elem, across, along): (Elem, usize, usize),
        reader: impl Fn(usize) -> Agent,
        unwritten: &mut BTreeSet<usize>,
    ) -> LaneResult<()> {
        for (row, at) in tile.chunks_of_rows(elem, (across, along)) {
            match shared.claim_read(reader(row), address_in(self.rank, at), 16) {
                Err(Fault::Uninitialised { .. }) if !tile.transposed && !elem.is_int() => drop(unwritten.insert(row)),
                result => result.map_err(fault)?,
            }
        }
        Ok(())
    }

    /// Reads the operands from shared memory, if that is not done.
    fn read(&self, env: &Env) -> LaneResult<()> {
        if self.values.get().is_none() {
            let values = if self.op.a_elem.is_int() {
                Values::Int(self.operands(env)?)
            } else {
                Values::Float(self.operands(env)?)
            };
            // Nothing else can have set it: a CTA is one thread.
            let _ = self.values.set(values);
        }
        Ok(())
    }

    fn operands<T: Number>(&self, env: &Env) -> LaneResult<Operands<T>> {
        let Shape { m, n, k } = self.op.shape;
        let value = |operand: usize, row: usize, x| {
            let unwritten = self.unwritten.get().is_some_and(|rows| rows[operand].contains(&row));
            if unwritten { T::undefined() } else { x }
        };
        let a = match (self.descriptors.0, &self.op.a) {
            (Some(descriptor), SourceA::Shared(_, transposed)) => {
                let tile = Tile::of_wgmma(descriptor, *transposed).map_err(fault)?;
                let mut a = vec![T::default(); m * k];
                let place = |row: usize, at: usize, x| a[row * k + at] = value(0, row, x);
                tile.read(env, self.rank, self.op.a_elem, (m, k), place).map_err(fault)?;
                Some(a)
            }
            _ => None,
        };
        let tile = Tile::of_wgmma(self.descriptors.1, self.op.b_transposed).map_err(fault)?;
        let mut b = vec![T::default(); k * n];
        let place = |column: usize, at: usize, x| b[at * n + column] = value(1, column, x);
        tile.read(env, self.rank, self.op.b_elem, (n, k), place).map_err(fault)?;
        if self.op.negate_b {
            b.iter_mut().for_each(|x| *x = x.negated());
        }
        Ok(Operands { a, b })
    }

    /// Adds the product to the warp's registers and gives them back.
    fn finish(&self, warp: &mut Warp) {
        match self.values.get() {
            Some(Values::Float(operands)) => self.multiply(warp, operands),
            Some(Values::Int(operands)) => self.multiply(warp, operands),
            None => {}
        }
        for slot in self.op.d.iter().chain(self.op.a_registers()) {
            warp.products.registers[*slot as usize].flights -= 1;
        }
    }

    /// The warp's 16 rows: their fragments are those of `mma.sync`, with more columns.
    fn multiply<T: Number>(&self, warp: &mut Warp, operands: &Operands<T>) {
        let (op, shape) = (&self.op, Shape { m: 16, ..self.op.shape });
        let of = |role, elem| Fragment::of(Layout::Mma, role, shape, elem);
        let rows = 16 * shape.k;
        let mut a = match &operands.a {
            Some(all) => all[warp.index % WARPS * rows..][..rows].to_vec(),
            None => of(Role::A, op.a_elem).read(&warp.regs, op.a_registers()),
        };
        if op.negate_a {
            a.iter_mut().for_each(|x| *x = x.negated());
        }
        let sums = of(Role::Sum, op.d_elem);
        let mut d: Vec<T> =
            if self.accumulates { sums.read(&warp.regs, &op.d) } else { vec![T::default(); 16 * shape.n] };
        multiply(shape.k, shape.n, &a, &operands.b, &mut d);
        sums.write(&mut warp.regs, &op.d, &d, op.saturate);
    }
}
