//! The launches of a decode step, as `mla-kernels` makes them, with arguments of their own: caches are small and their pages
//! used again and again, for what is in them changes no time.
use crate::forms::{Form, ROWS};
use crate::kernel::{Failure, Kernel};
use crate::merge::Merge;
use crate::shapes::{KEY, Shape, VALUE};
use crate::sparse::Sparse;
use ptx_sim::timing::Rates;
use ptx_sim::{Launch, Memory, Param, Stats, TensorElem, TensorMap, TensorSwizzle};

/// Channels of a tile.
const TILE: usize = 64;
/// Keys of a tile of the plan.
pub const PLAN_TILE: usize = 64;
/// Tokens of a page, and pages that there really are.
const PAGE: usize = 64;
const PAGES: usize = 64;

/// Shared memory of the planner, in bytes: at least what it uses.
const PLAN_SHARED: u64 = 24 << 10;

/// Shared memory of the merge, in bytes: at least what it uses.
const MERGE_SHARED: u64 = 8 << 10;

/// What the planner deals out.
pub struct Plan {
    pub items: Vec<[i32; 4]>,
    pub cube_ptr: Vec<i32>,
    pub split_ptr: Vec<i32>,
}

impl Plan {
    /// Blocks of keys of the items of each cube, each item's start and end counted as some more.
    pub fn loads(&self, of_item: usize) -> Vec<usize> {
        let blocks = |item: &[i32; 4]| (item[2] - item[1]).max(0) as usize / PLAN_TILE + of_item;
        let cube = |ends: &[i32]| self.items[ends[0] as usize..ends[1] as usize].iter().map(blocks).sum();
        self.cube_ptr.windows(2).map(cube).collect()
    }
}

fn words(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
}

fn bytes(words: impl IntoIterator<Item = i32>) -> Vec<u8> {
    words.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// The scalars of a kernel: what it reads of the last parameter, zeros behind.
fn scalars(words: &[u32], size: usize) -> Param {
    let mut all: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    all.resize(size, 0);
    Param::Bytes(all)
}

/// Plans on the simulator (`mla_plan`, `SplitMode::Auto`).
pub fn plan(kernel: &Kernel, shape: &Shape, cubes: usize) -> Result<Plan, Failure> {
    let capacity = shape.batch + cubes;
    let mut memory = Memory::new();
    let lens = memory.alloc(&bytes(vec![shape.keys as i32; shape.batch]));
    let [items, cube_ptr, split_ptr] =
        [4 * capacity, cubes + 1, shape.batch + 1].map(|count| memory.alloc(&vec![0; 4 * count]));
    let info = [shape.batch, shape.keys, PLAN_TILE, cubes, capacity].map(|n| n as u32);
    // There are no second lists: what stands for their lengths is not read.
    let params = [lens, lens, items, cube_ptr, split_ptr].map(Param::Buffer);
    let launch = Launch {
        block: [256, 1, 1],
        dynamic_shared: PLAN_SHARED,
        params: params.into_iter().chain([scalars(&info, 64)]).collect(),
        ..Launch::new(&kernel.module, kernel.entry())
    };
    launch.run(&memory).map_err(|error| kernel.fault(error))?;
    let rows = words(&memory.read(items)).as_chunks::<4>().0.to_vec();
    let (cube_ptr, split_ptr) = (words(&memory.read(cube_ptr)), words(&memory.read(split_ptr)));
    let used = split_ptr.last().copied().unwrap_or(0) as usize;
    Ok(Plan { items: rows[..used].to_vec(), cube_ptr, split_ptr })
}

/// Rows of `[tiles of 64 channels, rows, 64]`.
fn tile_map(address: u64, rows: usize, boxes: [u32; 3]) -> Param {
    let dims = vec![TILE as u64, rows as u64, (KEY / TILE) as u64];
    map(address, dims, vec![2 * KEY as u64, 2 * TILE as u64], boxes.to_vec())
}

/// Rows of so many bytes that are gathered, a tile of 64 channels of each at a time.
fn row_map(address: u64, rows: usize, bytes: usize) -> Param {
    map(address, vec![bytes as u64 / 2, rows as u64], vec![bytes as u64], vec![TILE as u32, 1])
}

fn map(address: u64, dims: Vec<u64>, strides: Vec<u64>, boxes: Vec<u32>) -> Param {
    let (elem, swizzle, steps) = (TensorElem::Float(2), TensorSwizzle::Bytes128, vec![1; dims.len()]);
    let map = TensorMap { elem, address, dims, strides, boxes, steps, swizzle, fill_nan: false };
    // The values above are such that the driver takes them.
    Param::Bytes(map.encode().map_or_else(|_| Vec::new(), |map| map.to_vec()))
}

impl Kernel {
    /// Decodes the items of one cube of the plan, the rows of its first tile.
    pub fn decode(
        &self,
        form: &Form,
        shape: &Shape,
        (plan, cube): (&Plan, usize),
        rates: &Rates,
    ) -> Result<Stats, Failure> {
        let rows = shape.rows();
        let max_pages = shape.keys.div_ceil(PAGE);
        let mut memory = Memory::new();
        let cache = memory.alloc(&vec![0; PAGES * PAGE * KEY * 2]);
        let query = memory.alloc(&vec![0; shape.batch * rows * KEY * 2]);
        let maps = [
            tile_map(memory.address(cache), PAGES * PAGE, [TILE as u32, form.box_keys as u32, 1]),
            tile_map(memory.address(query), shape.batch * rows, [TILE as u32, ROWS as u32, form.query_tiles as u32]),
        ];
        let pages = (0..shape.batch * max_pages).map(|page| (page % PAGES) as i32);
        let items = plan.items.iter().flatten().copied();
        let results = (shape.batch * rows * VALUE * 2, shape.batch * rows * 4);
        let buffers = [
            bytes(pages),
            bytes(vec![shape.keys as i32; shape.batch]),
            bytes(items),
            bytes(plan.cube_ptr.iter().copied()),
            bytes(plan.split_ptr.iter().copied()),
            vec![0; plan.items.len() * rows * VALUE * 4],
            vec![0; plan.items.len() * rows * 4],
            vec![0; results.0],
            vec![0; results.1],
            // CubeCL's own, which these kernels do not read.
            vec![0; 64],
        ];
        let buffers = buffers.map(|contents| Param::Buffer(memory.alloc(&contents)));
        let scale = (KEY as f32).powf(-0.5) * std::f32::consts::LOG2_E;
        let info = [
            scale.to_bits(),
            0,
            shape.queries as u32,
            shape.heads as u32,
            max_pages as u32,
            PAGE.ilog2(),
            f32::NEG_INFINITY.to_bits(),
        ];
        let tiles = form.clusters(shape) * form.ctas;
        let grid = [tiles as u32, (plan.cube_ptr.len() - 1) as u32, 1];
        let launch = Launch {
            grid,
            block: [form.threads, 1, 1],
            dynamic_shared: form.shared,
            params: maps.into_iter().chain(buffers).chain([scalars(&info, 96)]).collect(),
            rates: Some(rates),
            only: Some((cube * form.clusters(shape)) as u64),
            ..Launch::new(&self.module, self.entry())
        };
        launch.run(&memory).map_err(|error| self.fault(error))
    }

    /// Attends to the named rows of the tiles of one cube, of a grid of so many.
    pub fn attend(&self, form: &Sparse, cubes: usize, rates: &Rates) -> Result<Stats, Failure> {
        let rows = form.tokens * form.heads;
        let mut memory = Memory::new();
        let cache = memory.alloc(&vec![0; PAGES * PAGE * form.row_bytes()]);
        let query = memory.alloc(&vec![0; rows * KEY * 2]);
        let (words, cache, query) = (cache, memory.address(cache), memory.address(query));
        let maps = [
            tile_map(query, rows, [TILE as u32, ROWS as u32, (KEY / TILE) as u32]),
            row_map(cache, PAGES * PAGE, form.row_bytes()),
            row_map(cache, PAGES * PAGE, form.row_bytes()),
        ];
        // Any order will do: an odd step meets all.
        let slots = (0..form.tokens * form.entries).map(|entry| (entry * 1237 % (PAGES * PAGE)) as i32);
        let nothing = || vec![0; 64];
        let buffers = [
            bytes(slots),
            bytes(vec![form.entries as i32; form.tokens]),
            // The second list, the plan, the sink.
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            vec![0; form.splits * rows * VALUE * 4],
            vec![0; form.splits * rows * 4],
            vec![0; rows * VALUE * 2],
            vec![0; rows * 4],
            // CubeCL's own.
            nothing(),
        ];
        let buffers = buffers.map(|contents| Param::Buffer(memory.alloc(&contents)));
        let scale = (KEY as f32).powf(-0.5) * std::f32::consts::LOG2_E;
        let sizes = [form.heads, form.entries, 0, form.tiles(), form.splits, form.items(), 1, 0, 0, 0];
        let mut info = vec![scale.to_bits(), 0];
        // What says where pages have their scales, of both lists.
        info.extend([0; 4]);
        info.extend(sizes.map(|size| size as u32));
        info.push(f32::NEG_INFINITY.to_bits());
        let info = scalars(&info, 168);
        let launch = Launch {
            grid: [cubes as u32, 1, 1],
            block: [form.threads(), 1, 1],
            dynamic_shared: form.shared(),
            params: maps.into_iter().chain([words; 2].map(Param::Buffer)).chain(buffers).chain([info]).collect(),
            rates: Some(rates),
            only: Some(0),
            ..Launch::new(&self.module, self.entry())
        };
        launch.run(&memory).map_err(|error| self.fault(error))
    }

    /// Merges the splits of a sequence: one of the cubes that have a part of it, and how many there are of all sequences.
    pub fn merge(
        &self,
        form: &Merge,
        shape: &Shape,
        (plan, sequence): (&Plan, usize),
        rates: &Rates,
    ) -> Result<(Stats, usize), Failure> {
        let (rows, items) = (shape.rows(), plan.items.len());
        let mut memory = Memory::new();
        let buffers = [
            vec![0; items * rows * VALUE * 4],
            vec![0; items * rows * 4],
            bytes(plan.split_ptr.iter().copied()),
            vec![0; shape.batch * rows * VALUE * 2],
            vec![0; shape.batch * rows * 4],
        ];
        let buffers = buffers.map(|contents| Param::Buffer(memory.alloc(&contents)));
        let sizes = [shape.batch, rows, VALUE / 4, form.chunks, form.cube_rows, 0].map(|size| size as u32);
        let info = [sizes.as_slice(), &[f32::NEG_INFINITY.to_bits()]].concat();
        let cubes = rows.div_ceil(form.cube_rows) * form.chunks;
        let launch = Launch {
            grid: [(shape.batch * cubes) as u32, 1, 1],
            block: [form.columns as u32, form.groups as u32, 1],
            dynamic_shared: MERGE_SHARED,
            params: buffers.into_iter().chain([scalars(&info, 56)]).collect(),
            rates: Some(rates),
            only: Some((sequence * cubes) as u64),
            ..Launch::new(&self.module, self.entry())
        };
        let stats = launch.run(&memory).map_err(|error| self.fault(error))?;
        Ok((stats, shape.batch * cubes))
    }
}
