//! The launch of an architecture's kernel: its form, how the work is divided among cubes, and the merge of what has been split.

use cubecl::prelude::*;

use super::form::{Causal, Form, Stored, Writes};
use super::merge::{self, MergeArgs};
use super::select::{Division, Pairs};
use super::work::PagedKeysLaunch;
use super::{Pages, Partials, ScopeArgs, SparseMlaArgs, SparseMlaError, SparseMlaResults, SparsePlan};
use crate::common::launch::{dummy, multiprocessors, or_dummy, share};
use crate::compiler::names_all_sizes;
use crate::ptx::tma;
use crate::tiles::form::{Form as TileForm, KEYS, ROWS, TILE_WIDTH, VALUE_WIDTH};

/// The kernel of an architecture.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// Launches it.
    pub launch: fn(&Client, Call) -> Result<(), SparseMlaError>,
    /// When two cubes work together.
    pub pairs: Pairs,
}

/// What a kernel is launched with. Of what there is not it has something that is not read.
pub(super) struct Call<'a> {
    pub args: &'a SparseMlaArgs,
    pub form: Form,
    /// The second scope, or the first once more.
    pub second: &'a ScopeArgs,
    /// Of both lists.
    pub slots: [BufferArg; 2],
    pub lengths: [BufferArg; 2],
    /// Of the plan: `items`, `cube_ptr`, `split_ptr`.
    pub plan: [BufferArg; 3],
    pub sink: BufferArg,
    pub partial_out: BufferArg,
    pub partial_lse: BufferArg,
    pub out: BufferArg,
    pub lse: BufferArg,
    pub grid: Grid,
}

/// How the work is divided.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// Splits of all tiles, where no plan has them.
    pub items: u32,
    pub head_tiles: u32,
    pub splits: u32,
    /// By a plan: tiles of a sequence or query token, and for each the cubes of the plan.
    cubes: (u32, u32),
}

/// Launches the kernel, and the merge of its splits if there are some.
pub(super) fn launch(
    client: &Client,
    args: SparseMlaArgs,
    tile: TileForm,
    kernel: Kernel,
) -> Result<(), SparseMlaError> {
    let (tokens, heads) = (args.sizes.tokens, args.sizes.heads);
    let stored = |rows| Stored::of(rows, tile.bf16).ok_or(SparseMlaError::NoKernel);
    let rows = stored(args.sizes.rows)?;
    let rows = [rows, args.sizes.second_rows.map_or(Ok(rows), stored)?];
    let pairs = kernel.pairs;
    let head_tiles = pairs.tiles(heads.div_ceil(ROWS));
    let may_pair = pairs.are_possible(head_tiles, rows != [Stored::Dense; 2]);
    let most_blocks = [Some(&args.first), args.second.as_ref()]
        .into_iter()
        .flatten()
        .map(|scope| scope.most.div_ceil(KEYS))
        .sum::<usize>();
    let multiprocessors = multiprocessors(client);
    let (sink, splits_of_tiles) = match &args.results {
        SparseMlaResults::Output { sink, .. } => (sink.is_some(), !args.batch_invariant),
        SparseMlaResults::Parts { .. } => (false, false),
    };
    let tiles = tokens * head_tiles;
    let Division { splits, cluster } = match splits_of_tiles {
        true => pairs.division(tiles, most_blocks, multiprocessors, may_pair),
        false => Division::WHOLE,
    };
    let clusters = pairs.clusters(most_blocks);
    let lengths = |scope: Option<&ScopeArgs>| scope.is_some_and(|scope| scope.lengths.is_some());
    let causal = args.pages.as_ref().map(|pages| Causal(pages.causal));
    let pairs = |splits: usize| may_pair && pairs.pay(most_blocks.div_ceil(splits));
    let form = |writes, pair, merging| Form {
        tile,
        second: args.second.is_some(),
        lengths: [lengths(Some(&args.first)), lengths(args.second.as_ref())],
        sink,
        rows,
        pair,
        by_two: pair && kernel.pairs == Pairs::OfManyHeads,
        merging,
        pages: causal,
        writes,
    };
    if let Some(plan) = &args.plan {
        let query_len = args.pages.as_ref().map_or(1, |pages| pages.query_len);
        let cubes = ((query_len * head_tiles) as u32, plan.cubes as u32);
        let grid = Grid { items: 0, head_tiles: head_tiles as u32, splits: 1, cubes };
        if names_all_sizes() && args.pages.is_none() {
            // Who makes plans for few tokens makes none for many, whose tiles are not split.
            grid.launch(client, &args, form(Writes::Whole, pairs(1), 1), kernel)?;
        }
        // How a plan divides the blocks is not known here.
        return grid.launch(client, &args, form(Writes::Planned, may_pair, 1), kernel);
    }
    let pair = pairs(splits);
    let items = tiles.checked_mul(splits).ok_or(SparseMlaError::NoKernel)?;
    let (items, splits) = (u32::try_from(items), splits as u32);
    let items = items.map_err(|_| SparseMlaError::NoKernel)?;
    let most_cubes = if pair { multiprocessors.next_multiple_of(2) } else { multiprocessors };
    // A cube of a cluster has one split, or none.
    let cubes = if cluster > 1 { (tiles * cluster) as u32 } else { items.min(most_cubes as u32) };
    let cubes = (cubes, 1);
    let grid = Grid { items, head_tiles: head_tiles as u32, splits, cubes };
    if names_all_sizes() && splits_of_tiles {
        // Another number of tokens has splits of more or fewer blocks, down to one, or none.
        let whole = (Writes::Whole, pairs(1), 1);
        let split = [pairs(most_blocks.max(1)), pairs(1)].map(|pair| (Writes::Split, pair, 1));
        let merged = clusters.iter().map(|&cluster| (Writes::Split, false, cluster as u32));
        for (writes, pair, merging) in [whole].into_iter().chain(split).chain(merged) {
            grid.launch(client, &args, form(writes, pair, merging), kernel)?;
        }
    }
    let writes = match args.results {
        SparseMlaResults::Output { .. } if splits > 1 => Writes::Split,
        SparseMlaResults::Output { .. } => Writes::Whole,
        SparseMlaResults::Parts { .. } => Writes::Parts,
    };
    grid.launch(client, &args, form(writes, pair, cluster as u32), kernel)
}

impl Grid {
    /// Cubes of a launch.
    pub fn cubes(&self) -> CubeCount {
        CubeCount::Static(self.cubes.0, self.cubes.1, 1)
    }

    fn launch(&self, client: &Client, args: &SparseMlaArgs, form: Form, kernel: Kernel) -> Result<(), SparseMlaError> {
        let sizes = &args.sizes;
        let (partial_out, partial_lse, out, lse) = match &args.results {
            SparseMlaResults::Parts { acc, max, row_sum } => (share(acc), share(max), dummy(client), share(row_sum)),
            SparseMlaResults::Output { out, lse, .. } => {
                let (partial_out, partial_lse) = self.partials(client, args, form);
                (partial_out, partial_lse, share(out), share(lse))
            }
        };
        let sink = match &args.results {
            SparseMlaResults::Output { sink: Some(sink), .. } => share(sink),
            _ => dummy(client),
        };
        let scopes = [&args.first, args.second.as_ref().unwrap_or(&args.first)];
        let slots = |scope: &ScopeArgs| or_dummy(client, share(&scope.slots), sizes.tokens * scope.most);
        let lengths = |scope: &ScopeArgs| scope.lengths.as_ref().map_or_else(|| dummy(client), share);
        let plan = match &args.plan {
            Some(SparsePlan { items, cube_ptr, split_ptr, .. }) => [items, cube_ptr, split_ptr].map(share),
            None => [(); 3].map(|()| dummy(client)),
        };
        let merged_here = args.plan.as_ref().is_none_or(|plan| plan.partials.is_none());
        let merge = merged_here && !form.merges() && matches!(form.writes, Writes::Split | Writes::Planned);
        let merge = merge.then(|| MergeArgs {
            outs: share(&partial_out),
            lses: share(&partial_lse),
            split_ptr: args.plan.as_ref().map(|plan| share(&plan.split_ptr)),
            sink: share(&sink),
            has_sink: form.sink,
            out: share(&out),
            lse: share(&lse),
            rows: sizes.tokens * sizes.heads,
            heads: sizes.heads,
            splits: self.splits as usize,
            elem: sizes.elem,
        });
        let (slots, lengths) = (scopes.map(slots), scopes.map(lengths));
        let (second, grid) = (scopes[1], *self);
        (kernel.launch)(
            client,
            Call { args, form, second, slots, lengths, plan, sink, partial_out, partial_lse, out, lse, grid },
        )?;
        if let Some(args) = merge {
            merge::launch(client, args);
        }
        Ok(())
    }

    /// Where the results of splits go, and their lse. Without splits nobody looks at them.
    fn partials(&self, client: &Client, args: &SparseMlaArgs, form: Form) -> (BufferArg, BufferArg) {
        let splits = match (form.writes, &args.plan) {
            (Writes::Planned, Some(SparsePlan { partials: Some(Partials { out, lse }), .. })) => {
                return (share(out), share(lse));
            }
            (Writes::Planned, Some(plan)) => plan.capacity,
            (Writes::Split, _) => args.sizes.tokens * self.splits as usize,
            _ => return (dummy(client), dummy(client)),
        };
        let rows = splits * args.sizes.heads;
        (scratch(client, rows * VALUE_WIDTH), scratch(client, rows))
    }
}

impl Call<'_> {
    /// How the kernel finds pages, if there are some.
    pub fn pages(&self) -> PagedKeysLaunch {
        let [query_len, max_pages, page_shift, slot_count] = match &self.args.pages {
            None => [1, 0, 0, 0],
            Some(Pages { query_len, page_size, .. }) => [
                *query_len as u32,
                (self.args.first.most / page_size) as u32,
                page_size.ilog2(),
                self.args.first.row_count as u32,
            ],
        };
        PagedKeysLaunch::new(query_len, max_pages, page_shift, slot_count)
    }

    /// The map of the queries.
    pub fn query_map(&self) -> Result<TensorMapArg<Tiled>, SparseMlaError> {
        let sizes = &self.args.sizes;
        query_map(share(&self.args.q), self.form.tile, sizes.tokens * sizes.heads, sizes.elem)
    }

    /// The factor of the scores as powers of two.
    pub fn scale(&self) -> f32 {
        self.args.softmax_scale * std::f32::consts::LOG2_E
    }
}

/// A buffer for so many numbers.
pub(super) fn scratch(client: &Client, len: usize) -> BufferArg {
    // SAFETY: it has room for them.
    unsafe { BufferArg::from_raw_parts(client.empty(len * size_of::<f32>()), len) }
}

/// Rows of queries as `[tiles of 64 channels, rows, 64]`: one load brings all tiles of 64 rows.
pub(super) fn query_map(
    q: BufferArg,
    tile: TileForm,
    rows: usize,
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, SparseMlaError> {
    let BufferArg::Handle { handle } = q else { return Err(SparseMlaError::NoKernel) };
    let (shape, strides) = ([tile.tiles, rows, TILE_WIDTH], [TILE_WIDTH, tile.tiles * TILE_WIDTH, 1]);
    // SAFETY: the query has as many rows of as many channels.
    Ok(unsafe {
        tma::tiled_map(handle.handle, &shape, &strides, &[tile.tiles, ROWS, TILE_WIDTH], elem, TensorMapSwizzle::B128)
    })
}
