//! Norm of heads, and rotation of their last channels.
//!
//! Units side by side have a head, a vector of channels each at a time, and go over it twice: for the sum of squares, and to
//! write it. The second time its channels come from the cache.

mod head;
mod select;

use cubecl::prelude::*;

pub(crate) use self::head::Head;
pub(crate) use self::select::Form;
use self::select::Heads;
pub(crate) use self::select::Shape;
use crate::common::launch::{RowGrid, address_type, grid_row, or_dummy};

/// Arguments of [`launch`]; E is `elem`.
pub struct NormRopeArgs {
    /// E `[tokens, heads, width]`.
    pub x: BufferArg,
    /// f32: the weight of each channel that is normed, if the norm is [`Norm::Weighted`]; otherwise anything.
    pub weight: BufferArg,
    /// f32 `[tokens, pairs]`; without pairs anything.
    pub cos: BufferArg,
    /// f32 `[tokens, pairs]`; without pairs anything.
    pub sin: BufferArg,
    /// E `[tokens, heads, width]`, written.
    pub out: BufferArg,
    /// Tokens.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Channels of a head.
    pub width: usize,
    /// Pairs of neighbours among the last channels that RoPE applies to, at most `width / 2`.
    pub pairs: usize,
    /// What comes before the rotation.
    pub norm: Norm,
    /// Whether the norm is that of all channels, not only of those without RoPE.
    pub norm_whole_head: bool,
    /// Added to the mean square in the norm.
    pub eps: f32,
    /// Inverse RoPE.
    pub inverse: bool,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Whether a head is normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// No.
    None,
    /// Its root mean square becomes 1.
    Plain,
    /// And then each channel has a factor.
    Weighted,
}

impl NormRopeArgs {
    /// How the work is divided. The order of a norm's sum depends on the vectors and the units of a head alone.
    pub(crate) fn shape(&self, device: &DeviceProperties) -> Shape {
        let &Self { width, pairs, norm, norm_whole_head, inverse, elem, .. } = self;
        let parts = [width - 2 * pairs, 2 * pairs];
        select::choose(device, &Heads { norm, norm_whole_head, inverse, parts, elem })
    }
}

/// Writes `out`. Without elements nothing is launched.
pub fn launch(client: &Client, args: NormRopeArgs) {
    let (rows, width) = (args.tokens * args.heads, args.width);
    if rows * width == 0 {
        return;
    }
    let Shape { form, cube, vector } = args.shape(client.properties());
    let (elem, [weight, cos, sin]) = (args.elem, [args.weight, args.cos, args.sin]);
    let weight = or_dummy(client, weight, if form.norm == Norm::Weighted { width } else { 0 });
    norm_rope_kernel::launch(
        client,
        RowGrid::cubes(client, rows, cube),
        cube,
        address_type(client, &[&args.x]),
        vector,
        args.x,
        weight,
        or_dummy(client, cos, args.pairs),
        or_dummy(client, sin, args.pairs),
        args.out,
        rows,
        args.heads,
        width / vector,
        args.pairs,
        args.eps,
        form,
        elem,
    );
}

/// A row of units per head, of `vectors` vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn norm_rope_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    out: &mut [Vector<E, N>],
    rows: usize,
    heads: usize,
    vectors: usize,
    pairs: usize,
    eps: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    let mut column = UNIT_POS_X as usize;
    let head = Head::new::<E, N>(x, row, rows, heads, vectors, pairs, eps, column, form);
    if row < rows {
        while column < vectors {
            out[head.first + column] = Vector::cast_from(head.values::<E, N>(x, weight, cos, sin, column));
            column += comptime!(form.columns);
        }
    }
}

/// Queries of DeepSeek-V4, its keys, and its outputs; latents of DeepSeek-V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name, kind: FloatKind, (norm, norm_whole_head), inverse, address| {
        let elem = ElemType::Float(kind);
        let heads = Heads { norm, norm_whole_head, inverse, parts: [448, 64], elem };
        let Shape { form, cube, vector } = select::choose(&device, &heads);
        Entry::of(
            kind,
            name,
            form!(norm_rope_kernel, cube, [address, vector, _, _, _, _, _, 1, 1, 1, 1, 1.0, form, elem]),
        )
    };
    let forms = FLOATS.into_iter().flat_map(|kind| {
        [
            entry("norm_rope.plain", kind, (Norm::Plain, true), false, AddressType::U32),
            entry("norm_rope.weighted", kind, (Norm::Weighted, true), false, AddressType::U32),
            entry("norm_rope.latent", kind, (Norm::Weighted, false), false, AddressType::U32),
            entry("norm_rope.inverse", kind, (Norm::None, true), true, AddressType::U32),
        ]
    });
    let large = entry("norm_rope.64_bits", FloatKind::BF16, (Norm::Plain, true), false, AddressType::U64);
    forms.chain([large.on(|arch| arch == Arch::Sm90a)]).collect()
}
