//! Sparse attention without a plan. A tile is 64 heads of a token, of which a cube reads the rows of all entries; two cubes with 128 heads
//! share them.
use crate::forms::ROWS;
use crate::kernel::{Failure, Kernel};
use crate::shapes::{KEY, VALUE};
use ptx_sim::timing::Rates;
use std::path::Path;

/// Entries of a block.
const BLOCK: usize = 64;
/// Blocks that a split costs beside its own (`sparse_mla`, `SPLIT_COST`).
const SPLIT: usize = 2;
/// Tokens, heads and entries: decode steps of DeepSeek-V3.2, and a prompt.
const SHAPES: [[usize; 3]; 6] =
    [[64, 64, 2048], [128, 64, 2048], [64, 128, 2048], [128, 128, 2048], [592, 64, 2048], [592, 128, 2048]];

/// Lists that are all full.
pub struct Sparse {
    pub tokens: usize,
    pub heads: usize,
    pub entries: usize,
    /// Whether the rows are FP8 rows.
    pub fp8: bool,
    /// Cubes that share a tile.
    pub splits: usize,
}

/// Bytes of an FP8 row: 512 codes, four scales, 64 channels in bf16.
pub const FP8_ROW: usize = 656;

impl Sparse {
    fn new([tokens, heads, entries]: [usize; 3], fp8: bool, multiprocessors: usize) -> Self {
        let form = Self { tokens, heads, entries, fp8, splits: 1 };
        let (tiles, blocks) = (form.items() / form.ctas(), entries.div_ceil(BLOCK * form.ctas()));
        let clusters = multiprocessors / form.ctas();
        let cost = |splits: &usize| {
            let own = if *splits == 1 { 0 } else { SPLIT };
            (tiles * splits).div_ceil(clusters) * (blocks.div_ceil(*splits) + own)
        };
        let splits = (1..=blocks.min(clusters)).min_by_key(cost).unwrap_or(1);
        Self { splits, ..form }
    }

    /// Tiles of a token: an even number, or one.
    pub fn tiles(&self) -> usize {
        self.ctas() * self.heads.div_ceil(ROWS * self.ctas())
    }

    /// CTAs of a cluster, and blocks that they compute at a time.
    fn ctas(&self) -> usize {
        if self.heads > ROWS { 2 } else { 1 }
    }

    /// Splits of all tiles.
    pub fn items(&self) -> usize {
        self.tokens * self.tiles() * self.splits
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        match (self.ctas() == 2, self.fp8) {
            (true, false) => 288,
            (true, true) => 352,
            (false, false) => 256,
            (false, true) => 320,
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        if self.fp8 { FP8_ROW } else { 2 * KEY }
    }

    /// Bytes of shared memory of a CTA.
    pub fn shared(&self) -> u64 {
        if self.ctas() == 2 { 222_616 } else { 221_328 }
    }

    /// How often each byte is loaded: as often as there are tiles. A cube of a pair loads its own keys with all channels and half of
    /// the channels of all keys, 139,264 bytes of 147,456; of FP8 rows all of a row and its codes once more.
    fn times(&self) -> f64 {
        let of_pair = if self.fp8 { (FP8_ROW + VALUE) as f64 / FP8_ROW as f64 } else { 2.0 * 139_264.0 / 147_456.0 };
        if self.ctas() == 2 { of_pair * (self.tiles() / 2) as f64 } else { self.tiles() as f64 }
    }

    fn kernel(&self) -> String {
        let (pair, split) = (if self.ctas() == 2 { "_pair" } else { "" }, if self.splits > 1 { ".split" } else { "" });
        let fp8 = if self.fp8 { ".fp8" } else { "" };
        format!("sparse_mla.sm100{pair}.bf16.576{fp8}{split}.sm_100a")
    }
}

/// Prints the time of the kernel alone, without its launch and the merge of splits.
pub fn print(rates: &Rates, folder: &Path) -> Result<(), Failure> {
    println!(
        "\n| sparse: rows, tokens, h, entries | CTAs | blocks | cycles per block | kernel, us | bound, us | of the products' bound | of the bound |"
    );
    let multiprocessors = rates.multiprocessors as usize;
    for (fp8, shape) in [false, true].into_iter().flat_map(|fp8| SHAPES.map(|shape| (fp8, shape))) {
        let form = Sparse::new(shape, fp8, multiprocessors);
        let cubes = form.items().min(multiprocessors);
        let [tokens, heads, entries] = shape;
        let own = rates.shared_by(cubes, form.times());
        let stats = Kernel::load(folder, &form.kernel())?.attend(&form, cubes, &own)?;
        let blocks = form.items().div_ceil(cubes) * entries.div_ceil(BLOCK * form.splits);
        let (keys, found) = ((tokens * entries) as f64, rates.microseconds(stats.cycles as f64));
        let products = keys * heads as f64 * (KEY + VALUE) as f64 / rates.products / f64::from(rates.multiprocessors);
        let (products, memory) =
            (rates.microseconds(products), keys * form.row_bytes() as f64 / rates.memory_bandwidth * 1e6);
        let bound = if products > memory { format!("{products:.1} products") } else { format!("{memory:.1} memory") };
        let cycles = stats.cycles as f64 / blocks as f64;
        let format = if fp8 { "FP8" } else { "bf16" };
        println!(
            "| {format}, {tokens}, {heads}, {entries} | {cubes} | {blocks} | {cycles:.0} | {found:.1} | {bound} | {:.2} | {:.2} |",
            found / products,
            found / products.max(memory)
        );
    }
    println!();
    Ok(())
}
