//! Windows of tokens pooled into entries (DeepSeek-V4, compressed attention).
//!
//! A cube has an entry. Its units stand side by side along the channels, a vector each, and groups of them share the tokens
//! of the entry's windows: an online softmax for each channel, merged over the groups in shared memory. There the entry
//! stays for its norm and for its rotation.
//!
//! Where each sequence has one cube, as in a decode step, that one has read all that it needs of the state before the first barrier:
//! after that it writes the new tokens into the state, and its entry into a cache as well. That saves two launches. Such steps of several
//! compressors share one (`kernel.rs`).

mod kernel;
mod pool;
mod select;

use std::slice;

use cubecl::prelude::*;
use thiserror::Error;

use self::kernel::compress_kernel;
#[cfg(feature = "offline")]
pub(crate) use self::kernel::offline as offline_beside;
pub(crate) use self::kernel::{Compressor, compress_own};
use self::select::Shape;
use crate::common::device::{DeviceError, check_device};
use crate::common::launch::{address_type, io_vector_size};
use crate::compiler::names_all_sizes;

/// Arguments of [`launch`]; letters as in [`CompressKvSizes`], C is d, or 2 d with overlap, and L is m, or 2 m with overlap.
pub struct CompressKvArgs {
    /// G `[N, 2 C]`: keys and gates of the new tokens.
    pub kv_gates: BufferArg,
    /// f32 `[R, L, 2 C]`: those of tokens before them, of position `p` in row `p % L`. Written if there are `writes`.
    pub state: BufferArg,
    /// i32 `[B]`: the block of the state of each sequence, 0 to R - 1.
    pub state_rows: BufferArg,
    /// i32 `[B + 1]`, ascending from 0 to N: where the new tokens of each sequence begin.
    pub cu_seqlens: BufferArg,
    /// i32 `[B]`, at least 0: the position of the first new token of each sequence.
    pub starts: BufferArg,
    /// f32 `[m, C]`: added to the gates.
    pub position_bias: BufferArg,
    /// f32 `[d]`: the weight of the norm.
    pub norm_weight: BufferArg,
    /// f32 `[B, n, pairs]`.
    pub cos: BufferArg,
    /// f32 `[B, n, pairs]`.
    pub sin: BufferArg,
    /// E `[B, n, d]`, written: 0 where the new tokens do not fill the window.
    pub entries: BufferArg,
    /// What is written beside them; only where n is 1. Sequences have different blocks of the state then.
    pub writes: Option<Writes>,
    /// Sizes and the types G and E.
    pub sizes: CompressKvSizes,
    /// Added to the mean square.
    pub norm_eps: f32,
}

/// What else a launch writes.
pub struct Writes {
    /// i32 `[N]`: the row of the state, `block * L + position % L`, of each new token; -1 for none.
    pub state_slots: BufferArg,
    /// Where entries go.
    pub cache: Option<EntryCache>,
}

/// A cache of entries.
pub struct EntryCache {
    /// E `[rows, d]`, written.
    pub cache: BufferArg,
    /// i32 `[B]`: the row of each sequence's entry; -1 for none.
    pub slots: BufferArg,
    /// Its rows.
    pub rows: usize,
}

/// What decides whether a device can compute it.
#[derive(Debug, Clone, Copy)]
pub struct CompressKvSizes {
    /// N, new tokens.
    pub tokens: usize,
    /// B, sequences.
    pub batch: usize,
    /// n, entries of a sequence.
    pub entries: usize,
    /// R, blocks of the state.
    pub blocks: usize,
    /// m, tokens of a window, at least 1.
    pub window: usize,
    /// d, channels of an entry, at least 1.
    pub width: usize,
    /// Pairs of the last channels that RoPE applies to, at most d / 2.
    pub pairs: usize,
    /// Whether an entry pools the window before its own, too.
    pub overlap: bool,
    /// G, of new keys and gates: f32, f16 or bf16.
    pub gates_elem: ElemType,
    /// E, of the entries: f32, f16 or bf16.
    pub elem: ElemType,
}

/// Why [`launch`] did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompressKvError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("`{name}` has {len} elements, which needs 64-bit offsets, which the device does not have")]
    Offsets {
        /// The argument.
        name: &'static str,
        /// Its elements.
        len: usize,
    },
}

impl CompressKvSizes {
    /// Windows that an entry pools.
    fn windows(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }

    /// Rows of the state.
    fn state_rows(&self) -> usize {
        self.blocks * self.windows() * self.window
    }

    /// Elements of `kv_gates`, `state` and `entries`.
    fn lens(&self) -> [(&'static str, usize); 3] {
        let row = 2 * self.windows() * self.width;
        [
            ("kv_gates", self.tokens * row),
            ("state", self.state_rows() * row),
            ("entries", self.batch * self.entries * self.width),
        ]
    }
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &CompressKvSizes) -> Result<(), CompressKvError> {
    prepare(client, sizes).map(|_| ())
}

/// All checks, and elements of a vector.
fn prepare(client: &Client, sizes: &CompressKvSizes) -> Result<usize, CompressKvError> {
    let vector_size = io_vector_size(client.properties(), &[sizes.width], size_of::<f32>());
    let shared_bytes = Shape::new(sizes, vector_size).shared_bytes();
    for elem in [sizes.elem, sizes.gates_elem] {
        check_device(client, elem, shared_bytes)?;
    }
    let reached = |len: usize| client.properties().supports_address(AddressType::from_len(len));
    match sizes.lens().into_iter().find(|(_, len)| !reached(*len)) {
        Some((name, len)) => Err(CompressKvError::Offsets { name, len }),
        None => Ok(vector_size),
    }
}

/// Writes `entries`, and `writes`; a slot past the end is skipped like -1. Without entries nothing is launched.
///
/// # Errors
/// What the device lacks; nothing was launched.
pub fn launch(client: &Client, args: CompressKvArgs) -> Result<(), CompressKvError> {
    launch_each(client, &[args])
}

/// The same for several compressors, of which none reads what another one writes: in one launch, where all have `writes` and a cube has
/// room for what they need.
///
/// # Errors
/// As [`launch`]; nothing was launched.
pub fn launch_each(client: &Client, all: &[CompressKvArgs]) -> Result<(), CompressKvError> {
    let mut forms = Vec::with_capacity(all.len());
    for args in all {
        forms.push(Form::new(client, args)?);
    }
    forms.retain(|form| form.cubes() > 0);
    if names_all_sizes() && forms.iter().any(|form| !form.shape.writes) {
        launch_forms(client, &Vec::from_iter(forms.iter().map(Form::of_step)));
    }
    launch_forms(client, &forms);
    Ok(())
}

/// Compressors that another launch computes beside its own work: see [`beside`].
pub(crate) struct Beside<'a>(Vec<Form<'a>>);

/// These, if they fit into a launch of numbers of one type with so many buffers of its own, and cubes of at least so many units.
///
/// # Errors
/// As [`launch`].
pub(crate) fn beside<'a>(
    client: &Client,
    all: &'a [CompressKvArgs],
    elem: ElemType,
    [buffers, units]: [usize; 2],
) -> Result<Option<Beside<'a>>, CompressKvError> {
    let mut forms = Vec::with_capacity(all.len());
    for args in all {
        forms.push(Form::new(client, args)?);
    }
    let fits = |form: &Form<'_>| form.cubes() > 0 && form.shape.units() >= units && form.common().2 == [elem; 2];
    let fit = !forms.is_empty() && forms.iter().all(fits) && share_a_launch(client, &forms, buffers);
    Ok(fit.then_some(Beside(forms)))
}

impl Beside<'_> {
    /// Of a cube: a power of two.
    pub(crate) fn units(&self) -> usize {
        self.0[0].shape.units()
    }

    /// Elements of a vector.
    pub(crate) fn vector_size(&self) -> usize {
        self.0[0].vector_size
    }

    pub(crate) fn cubes(&self) -> usize {
        self.0.iter().map(Form::cubes).sum()
    }

    /// Those that may be large.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &BufferArg> {
        self.0.iter().flat_map(Form::buffers)
    }

    /// As a kernel takes them.
    pub(crate) fn bind<G: Float, E: Float, N: Size>(&self, client: &Client) -> SequenceArg<Compressor<G, E, N>> {
        self.0.iter().map(|form| kernel::bind(client, form.args, form.shape)).collect()
    }
}

/// One of the compressors of a launch.
struct Form<'a> {
    args: &'a CompressKvArgs,
    shape: Shape,
    vector_size: usize,
    gates_elem: ElemType,
}

/// Buffers of a compressor.
const BUFFERS: usize = 13;

impl<'a> Form<'a> {
    fn new(client: &Client, args: &'a CompressKvArgs) -> Result<Self, CompressKvError> {
        let (sizes, vector_size) = (&args.sizes, prepare(client, &args.sizes)?);
        let caches = args.writes.as_ref().is_some_and(|writes| writes.cache.is_some());
        let shape = Shape { writes: args.writes.is_some(), caches, ..Shape::new(sizes, vector_size) };
        Ok(Self { args, shape, vector_size, gates_elem: sizes.gates_elem })
    }

    /// That of a decode step: keys and gates are of the dtype of the entries then.
    fn of_step(&self) -> Self {
        let shape = Shape { writes: true, caches: true, ..self.shape };
        Self { shape, gates_elem: self.args.sizes.elem, ..*self }
    }

    fn cubes(&self) -> usize {
        self.args.sizes.batch * self.args.sizes.entries
    }

    fn cache(&self) -> Option<&EntryCache> {
        self.args.writes.as_ref().and_then(|writes| writes.cache.as_ref())
    }

    /// Those that may be large.
    fn buffers(&self) -> impl Iterator<Item = &BufferArg> {
        let CompressKvArgs { kv_gates, state, entries, .. } = self.args;
        [kv_gates, state, entries].into_iter().chain(self.cache().map(|to| &to.cache))
    }

    /// What a kernel's code has of all compressors alike.
    fn common(&self) -> (usize, usize, [ElemType; 2]) {
        (self.shape.units(), self.vector_size, [self.gates_elem, self.args.sizes.elem])
    }
}

/// Whether all of them fit into one launch, with so many buffers beside theirs.
fn share_a_launch(client: &Client, forms: &[Form<'_>], buffers: usize) -> bool {
    let hardware = &client.properties().hardware;
    let alike = forms.iter().all(|form| form.shape.writes && form.common() == forms[0].common());
    // Beside them there is what the launch tells of sizes.
    let bound = forms.len() * BUFFERS + buffers < hardware.max_bindings as usize;
    let shared_bytes: usize = forms.iter().map(|form| form.shape.shared_bytes()).sum();
    alike && bound && shared_bytes <= hardware.max_shared_memory_size
}

fn launch_forms(client: &Client, forms: &[Form<'_>]) {
    let Some(first) = forms.first() else { return };
    if forms.len() > 1 && !share_a_launch(client, forms, 0) {
        forms.iter().for_each(|form| launch_forms(client, slice::from_ref(form)));
        return;
    }
    let (units, vector_size, [gates_elem, elem]) = first.common();
    let cubes = forms.iter().map(Form::cubes).sum();
    compress_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        CubeDim::new_1d(units as u32),
        address_type(client, &Vec::from_iter(forms.iter().flat_map(Form::buffers))),
        vector_size,
        forms.iter().map(|form| kernel::bind(client, form.args, form.shape)).collect(),
        gates_elem,
        elem,
    );
}

/// Those of a decode step of V4: of entries of 512 channels, and of index keys of 128.
#[cfg(feature = "offline")]
pub(crate) fn shapes_of_v4(device: &DeviceProperties) -> Vec<Shape> {
    let shape = |width| offline_shape(device, (4, width, true), true);
    [512, 128].map(shape).into()
}

#[cfg(feature = "offline")]
fn offline_shape(device: &DeviceProperties, (window, width, overlap): (usize, usize, bool), writes: bool) -> Shape {
    let (tokens, batch, entries, blocks, pairs) = (1, 1, 1, 1, 32);
    let [gates_elem, elem] = [ElemType::Float(cubecl::ir::FloatKind::F32); 2];
    let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, gates_elem, elem };
    let vector_size = io_vector_size(device, &[width], size_of::<f32>());
    Shape { writes, caches: writes, ..Shape::new(&sizes, vector_size) }
}

/// V4's entries of 512 channels, of 4 tokens with overlap and of 128 without, and the index keys of 128 channels.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name, kind, bits, windows: &[(usize, usize, bool)], writes| {
        let n = io_vector_size(&device, &[windows[0].1], size_of::<f32>());
        let shapes = Vec::from_iter(windows.iter().map(|&window| offline_shape(&device, window, writes)));
        let (dim, elem) = (CubeDim::new_1d(shapes[0].units() as u32), ElemType::Float(kind));
        let form = form!(compress_kernel, dim, [bits, n, kernel::offline(&shapes), elem, elem]);
        Entry::of(kind, name, form)
    };
    let (narrow, wide) = (AddressType::U32, AddressType::U64);
    let (overlap, long, index) = ((4, 512, true), (128, 512, false), (4, 128, true));
    let prompt = FLOATS.map(|kind| entry("compress_kv.overlap", kind, narrow, &[overlap], false));
    let long_prompt = entry("compress_kv.long", FloatKind::F16, narrow, &[long], false);
    let index_prompt = entry("compress_kv.index", FloatKind::F16, narrow, &[index], false);
    let step = FLOATS.map(|kind| entry("compress_kv.step", kind, narrow, &[overlap], true));
    let both = FLOATS.map(|kind| entry("compress_kv.steps", kind, narrow, &[overlap, index], true));
    let long_step = entry("compress_kv.long_step", FloatKind::BF16, narrow, &[long], true);
    let large = entry("compress_kv.64_bits", FloatKind::BF16, wide, &[overlap], true).on(|arch| arch == Arch::Sm90a);
    let of_floats = [prompt, step, both].into_iter().flatten();
    of_floats.chain([long_prompt, index_prompt, long_step, large]).collect()
}
