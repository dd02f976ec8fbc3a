//! `tcgen05.mma` of `.kind::f16` (PTX ISA, TensorCore 5th Generation Matrix Multiply and accumulate Operations).
//!
//! Products are exact; a sum starts at D and takes them in the order of k, rounded to f32 each time (see
//! [`product`](crate::exec::product)).
use super::descriptor::{CHUNK, Instruction, ZeroColumns, shared_matrix};
use super::history::Operation;
use super::layout::DataPath;
use super::pipeline::{enqueue, issue as begin};
use super::tmem::{Place, TensorMemory};
use crate::error::Fault;
use crate::exec::address;
use crate::exec::descriptor::Tile;
use crate::exec::env::Env;
use crate::exec::product::{Number, multiply};
use crate::exec::shared::address_in;
use crate::exec::warp::Warp;
use crate::ir::Elem;
use crate::ir::tcgen05::{MatrixA, Mma};
use std::ops::Range;

/// The inner dimension of `.kind::f16`.
const K: usize = 16;
/// Columns of tensor memory that a row of A takes.
const A_COLUMNS: u32 = 8;
/// Elements of a chunk.
const CHUNK_ELEMENTS: u32 = 8;
/// Rows that lie in as many neighbouring lanes in all layouts.
const TOGETHER: u32 = 16;

/// Where A is.
#[derive(Clone, Copy)]
enum SourceA {
    Shared(Tile),
    Tensor(Place),
}

/// A multiplication that was issued.
struct Plan {
    /// The CTAs, the even one first.
    ranks: Vec<usize>,
    path: DataPath,
    d: Place,
    a: SourceA,
    b: Tile,
    instruction: Instruction,
    accumulate: bool,
    scale: f32,
    /// Lanes of each CTA that are not written.
    disabled: Vec<u128>,
    zeros: Option<ZeroColumns>,
}

/// Chunks that hold rows of a matrix of K columns, each with the first row and the first k that it has.
fn chunks(tile: Tile, rows: Range<u32>) -> impl Iterator<Item = (u64, u32, usize)> {
    let step = if tile.transposed { CHUNK_ELEMENTS } else { 1 };
    let parts = if tile.transposed { K } else { K / CHUNK_ELEMENTS as usize };
    (rows.start / step..rows.end.div_ceil(step)).flat_map(move |row| {
        (0..parts).map(move |part| {
            if tile.transposed {
                (tile.chunk(part as u64, u64::from(row) * CHUNK), row * step, part)
            } else {
                (tile.chunk(row.into(), part as u64 * CHUNK), row, part * CHUNK_ELEMENTS as usize)
            }
        })
    })
}

/// Rows of K elements from a CTA's shared memory.
fn read_rows(env: &Env, rank: usize, tile: Tile, rows: Range<u32>, elem: Elem) -> Result<Vec<f32>, Fault> {
    let mut found = vec![0.0; rows.len() * K];
    for (address, row, k) in chunks(tile, rows.clone()) {
        let mut bytes = [0; CHUNK as usize];
        env.shared.peek(address_in(rank, address), &mut bytes)?;
        for (i, pair) in bytes.as_chunks::<2>().0.iter().enumerate() {
            let (row, k) = if tile.transposed { (row + i as u32, k) } else { (row, k + i) };
            if rows.contains(&row) {
                let bits = u32::from(u16::from_le_bytes(*pair));
                found[(row - rows.start) as usize * K + k] = f32::decode(elem, bits);
            }
        }
    }
    Ok(found)
}

impl Plan {
    fn new(warp: &Warp, lane: usize, op: &Mma) -> Result<Self, Fault> {
        let word = |slot| warp.regs.row(slot)[lane];
        let instruction = Instruction::new(word(op.instruction) as u32, op.group, op.weight_stationary)?;
        let Instruction { m, n, .. } = instruction;
        let d = Place::new(address::address(warp, op.d, lane) as u32);
        let path = DataPath::new(m, op.group, op.weight_stationary)
            .ok_or_else(|| d.fault(format!("there is no data path layout for M = {m}")))?;
        if !path.may_start(d.lane) {
            return Err(d.fault(format!("matrix D of M = {m} cannot start in this lane")));
        }
        let a = match op.a {
            MatrixA::Shared(slot) => SourceA::Shared(shared_matrix(word(slot), instruction.transpose_a)?),
            MatrixA::Tensor(address) => {
                let a = Place::new(address::address(warp, address, lane) as u32);
                // Layout F: "must use the same Tensor Memory lane alignment across matrices A, D".
                if a.lane != d.lane || instruction.transpose_a {
                    return Err(a.fault("matrix A must start in D's lane, and be K-major"));
                }
                SourceA::Tensor(a)
            }
        };
        let words = op.disable_output_lane.iter().flatten();
        let disabled: Vec<u128> = words.map(|slot| u128::from(word(*slot) as u32)).collect();
        let disabled = disabled.chunks(4).map(|c| c.iter().rev().fold(0, |all, word| all << 32 | word)).collect();
        let first = if op.group == 2 { warp.rank & !1 } else { warp.rank };
        Ok(Self {
            ranks: (first..first + usize::from(op.group)).collect(),
            path,
            d,
            a,
            b: shared_matrix(word(op.b), instruction.transpose_b)?,
            instruction,
            accumulate: warp.regs.pred(op.enable_input_d) >> lane & 1 == 1,
            scale: (-(op.scale_input_d as f32)).exp2(),
            disabled,
            zeros: op.zero_column_mask.map(|slot| ZeroColumns::new(word(slot), m, n)).transpose()?,
        })
    }

    fn elem(&self) -> Elem {
        if self.instruction.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Rows of B, that is columns of D, in one CTA's shared memory: a pair has half of them each.
    fn b_rows(&self) -> Range<u32> {
        let shift = self.zeros.map_or(0, |zeros| zeros.shifted(0));
        shift..shift + self.instruction.n / self.ranks.len() as u32
    }

    /// Columns of D in tensor memory.
    fn width(&self) -> u32 {
        self.instruction.n / self.path.splits()
    }

    fn is_disabled(&self, cta: usize, lane: u32) -> bool {
        self.disabled.get(cta).is_some_and(|lanes| lanes >> lane & 1 == 1)
    }

    /// The first lanes of groups of rows, from D's lane on.
    fn groups(&self) -> impl Iterator<Item = u32> + '_ {
        let rows = (0..self.path.rows()).step_by(TOGETHER as usize);
        rows.flat_map(move |row| (0..self.path.splits()).map(move |split| self.d.lane + self.path.lane(row, split)))
    }

    /// Checks and notes all that will be read and written.
    fn claim(&self, warp: &Warp, env: &mut Env, lane: usize) -> Result<(), Fault> {
        let Instruction { m, n, .. } = self.instruction;
        let operation = Operation::Mma { accumulator: self.d.lane << 16 | self.d.column, shape: (m, n) };
        let (number, agent) = begin(warp, env, lane, operation);
        for (cta, &rank) in self.ranks.iter().enumerate() {
            let b = chunks(self.b, self.b_rows());
            let a = match self.a {
                SourceA::Shared(a) => Some(chunks(a, 0..self.path.rows())),
                SourceA::Tensor(_) => None,
            };
            for (address, ..) in b.chain(a.into_iter().flatten()) {
                env.shared.claim_read(agent, address_in(rank, address), CHUNK)?;
            }
            for first in self.groups() {
                let lanes = first..first + TOGETHER;
                if let SourceA::Tensor(a) = self.a {
                    env.tensor.access(rank, (warp.agent, number, false), lanes.clone(), (a.column, A_COLUMNS))?;
                }
                if lanes.clone().any(|lane| !self.is_disabled(cta, lane)) {
                    env.tensor.access(rank, (warp.agent, number, true), lanes, (self.d.column, self.width()))?;
                }
            }
        }
        Ok(())
    }

    /// What it takes of the tensor cores and of shared memory.
    fn take_time(&self, env: &mut Env) {
        let Some(time) = &mut env.time else { return };
        let Instruction { m, n, .. } = self.instruction;
        let rows = m / self.ranks.len() as u32;
        let a = if matches!(self.a, SourceA::Shared(_)) { rows } else { 0 };
        let bytes = u64::from(a + self.b_rows().len() as u32) * 2 * K as u64;
        time.tensor_product(&self.ranks, (rows, n, K as u32), bytes);
    }

    /// B, by columns of D in their splits: each K rows.
    fn read_b(&self, env: &Env) -> Result<Vec<Vec<f32>>, Fault> {
        let mut columns = Vec::new();
        for &rank in &self.ranks {
            columns.extend(read_rows(env, rank, self.b, self.b_rows(), self.elem())?);
        }
        for (n, column) in columns.chunks_mut(K).enumerate() {
            if self.zeros.is_some_and(|zeros| zeros.is_zero(n as u32)) {
                column.fill(0.0);
            }
        }
        let width = self.width() as usize;
        let sign = if self.instruction.negate_b { -1.0 } else { 1.0 };
        let split = |part: &[f32]| (0..K * width).map(|i| sign * part[i % width * K + i / width]).collect();
        Ok(columns.chunks(K * width).map(split).collect())
    }

    /// Rows of A that belong to a CTA's lanes of one split.
    fn read_a(&self, env: &Env, rank: usize, split: u32) -> Result<Vec<f32>, Fault> {
        let elem = self.elem();
        let mut a = match self.a {
            SourceA::Shared(a) => read_rows(env, rank, a, 0..self.path.rows(), elem)?,
            SourceA::Tensor(place) => {
                let mut a = Vec::with_capacity(self.path.rows() as usize * K);
                for row in 0..self.path.rows() {
                    let lane = place.lane + self.path.lane(row, split);
                    for word in env.tensor.ctas[rank].memory.read(Place { lane, ..place }, A_COLUMNS)? {
                        a.extend([word & 0xffff, word >> 16].map(|bits| f32::decode(elem, bits)));
                    }
                }
                a
            }
        };
        if self.instruction.negate_a {
            a.iter_mut().for_each(|x| *x = -*x);
        }
        Ok(a)
    }

    /// Multiplies.
    fn run(self, env: &mut Env) -> Result<(), Fault> {
        let b = self.read_b(env)?;
        let d_elem = if self.instruction.half_d { Elem::F16 } else { Elem::F32 };
        let width = self.width();
        for (cta, &rank) in self.ranks.iter().enumerate() {
            for split in 0..self.path.splits() {
                let a = self.read_a(env, rank, split)?;
                let place = |row| Place { lane: self.d.lane + self.path.lane(row, split), column: self.d.column };
                let mut sums = vec![0.0; (self.path.rows() * width) as usize];
                let memory = &mut env.tensor.ctas[rank].memory;
                for (row, sums) in sums.chunks_mut(width as usize).enumerate() {
                    let place = place(row as u32);
                    if self.accumulate && !self.is_disabled(cta, place.lane) {
                        let old = memory.read(place, width)?;
                        sums.iter_mut().zip(old).for_each(|(sum, old)| *sum = self.scale * f32::decode(d_elem, *old));
                    }
                }
                multiply(K, width as usize, &a, &b[split as usize], &mut sums);
                for (row, sums) in sums.chunks(width as usize).enumerate() {
                    let place = place(row as u32);
                    if !self.is_disabled(cta, place.lane) {
                        let words = memory.row_mut(place, width);
                        words.iter_mut().zip(sums).for_each(|(word, sum)| *word = encode(*sum, d_elem));
                    }
                }
            }
        }
        env.matrix_flops += 2 * u64::from(self.instruction.m * self.instruction.n) * K as u64;
        Ok(())
    }
}

/// An element of D in its word (PTX ISA, Packing format for matrix D in Tensor Memory).
fn encode(sum: f32, elem: Elem) -> u32 {
    let bits = sum.encode(elem, false);
    if elem == Elem::F16 { TensorMemory::lower_half(bits as u16) } else { bits }
}

/// Issues a multiplication.
pub(super) fn issue(warp: &Warp, env: &mut Env, lane: usize, op: &Mma) -> Result<(), Fault> {
    let plan = Plan::new(warp, lane, op)?;
    plan.claim(warp, env, lane)?;
    plan.take_time(env);
    let ctas = plan.ranks.iter().fold(0, |ctas, rank| ctas | 1 << rank);
    enqueue(warp, env, ctas, Box::new(move |env| plan.run(env)));
    Ok(())
}
