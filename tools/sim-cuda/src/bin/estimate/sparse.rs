//! Sparse attention without a plan. A tile is 64 heads of a token, and reads the rows of all its entries.
use crate::forms::ROWS;
use crate::launches::{Failure, Kernel};
use crate::shapes::{KEY, VALUE};
use ptx_sim::timing::Rates;
use std::path::Path;

/// Entries of a block.
const BLOCK: usize = 64;
/// Blocks that a split costs beside its own (`sparse_mla`, `SPLIT_COST`).
const SPLIT: usize = 2;
/// Tokens, heads and entries: decode steps of DeepSeek-V3.2, and a prompt.
const SHAPES: [[usize; 3]; 4] = [[64, 64, 2048], [128, 64, 2048], [64, 128, 2048], [592, 64, 2048]];

/// Lists that are all full.
pub struct Sparse {
    pub tokens: usize,
    pub heads: usize,
    pub entries: usize,
    /// Cubes that share a tile.
    pub splits: usize,
}

impl Sparse {
    fn new([tokens, heads, entries]: [usize; 3], multiprocessors: usize) -> Self {
        let (tiles, blocks) = (tokens * heads.div_ceil(ROWS), entries.div_ceil(BLOCK));
        let cost = |splits: &usize| {
            let own = if *splits == 1 { 0 } else { SPLIT };
            (tiles * splits).div_ceil(multiprocessors) * (blocks.div_ceil(*splits) + own)
        };
        let splits = (1..=blocks.min(multiprocessors)).min_by_key(cost).unwrap_or(1);
        Self { tokens, heads, entries, splits }
    }

    /// Splits of all tiles.
    pub fn items(&self) -> usize {
        self.tokens * self.heads.div_ceil(ROWS) * self.splits
    }

    fn kernel(&self) -> &'static str {
        if self.splits > 1 { "sparse_mla.sm100.bf16.576.split.sm_100a" } else { "sparse_mla.sm100.bf16.576.sm_100a" }
    }
}

/// Prints the time of the kernel alone, without its launch and the merge of splits.
pub fn print(rates: &Rates, folder: &Path) -> Result<(), Failure> {
    println!(
        "\n| sparse: tokens, h, entries | CTAs | blocks | cycles per block | kernel, us | bound, us | of the products' bound |"
    );
    let multiprocessors = rates.multiprocessors as usize;
    for shape in SHAPES {
        let form = Sparse::new(shape, multiprocessors);
        let cubes = form.items().min(multiprocessors);
        let [tokens, heads, entries] = shape;
        let own = rates.shared_by(cubes, heads.div_ceil(ROWS) as f64);
        let stats = Kernel::load(folder, form.kernel())?.attend(&form, cubes, &own)?;
        let blocks = form.items().div_ceil(cubes) * entries.div_ceil(BLOCK * form.splits);
        let (keys, found) = ((tokens * entries) as f64, rates.microseconds(stats.cycles as f64));
        let products = keys * heads as f64 * (KEY + VALUE) as f64 / rates.products / f64::from(rates.multiprocessors);
        let (products, memory) = (rates.microseconds(products), keys * KEY as f64 * 2.0 / rates.memory_bandwidth * 1e6);
        let bound = if products > memory { format!("{products:.1} products") } else { format!("{memory:.1} memory") };
        let cycles = stats.cycles as f64 / blocks as f64;
        println!(
            "| {tokens}, {heads}, {entries} | {cubes} | {blocks} | {cycles:.0} | {found:.1} | {bound} | {:.2} |",
            found / products
        );
    }
    println!();
    Ok(())
}
