//! Norm of heads, and rotation of their last channels.
//!
//! Units side by side have a head, a vector of channels each at a time, and go over it twice: for the sum of squares, and to
//! write it. The second time its channels come from the cache.

use cubecl::prelude::*;

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
    pub norm_turned: bool,
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

/// Writes `out`. Without elements nothing is launched.
pub fn launch(client: &Client, args: NormRopeArgs) {
    let (rows, width) = (args.tokens * args.heads, args.width);
    if rows * width == 0 {
        return;
    }
    let parts = [width - 2 * args.pairs, 2 * args.pairs];
    let grid = RowGrid::new(client, rows, &parts, args.elem.size());
    norm_rope_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.x]),
        grid.vector_size,
        args.x,
        or_dummy(client, args.weight, if args.norm == Norm::Weighted { width } else { 0 }),
        or_dummy(client, args.cos, args.pairs),
        or_dummy(client, args.sin, args.pairs),
        args.out,
        rows,
        args.heads,
        width / grid.vector_size,
        args.pairs,
        args.eps,
        Form {
            norm: args.norm,
            norm_turned: args.norm_turned,
            inverse: args.inverse,
            columns: grid.cube_dim.x as usize,
            units: grid.cube_dim.num_elems() as usize,
        },
        args.elem,
    );
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub norm: Norm,
    pub norm_turned: bool,
    pub inverse: bool,
    /// Units of a head.
    pub columns: usize,
    /// Units of a cube.
    pub units: usize,
}

impl Form {
    /// Heads of a cube.
    pub fn heads(&self) -> usize {
        self.units / self.columns
    }

    /// Cubes for so many heads.
    pub fn cubes(&self, heads: usize) -> usize {
        heads.div_ceil(self.heads())
    }
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

/// A head, the scale of its norm, and its rotation.
#[derive(CubeType)]
pub(crate) struct Head {
    /// Its first vector.
    pub first: usize,
    /// Its vectors that are normed: the first ones, or all.
    normed: usize,
    scale: f32,
    /// Its channels without RoPE.
    still: usize,
    /// The first pair of its token in the tables.
    rotation: usize,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Head {
    /// Number `row` of `rows`. Called by all units of a cube; `column` is the place of this one among those of the head.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new<E: Float, N: Size>(
        x: &[Vector<E, N>],
        row: usize,
        rows: usize,
        heads: usize,
        vectors: usize,
        pairs: usize,
        eps: f32,
        column: usize,
        #[comptime] form: Form,
    ) -> Head {
        let lanes = N::value().comptime();
        let still = vectors * lanes - 2 * pairs;
        let mut normed = vectors;
        if comptime!(!form.norm_turned) {
            normed = still / lanes;
        }
        let first = row * vectors;
        let mut scale = 1.0f32;
        if comptime!(form.norm != Norm::None) {
            let mut squares = 0.0f32;
            if row < rows {
                let mut at = column;
                while at < normed {
                    let values = Vector::<f32, N>::cast_from(x[first + at]);
                    #[unroll]
                    for lane in 0..lanes {
                        squares += values.extract(lane) * values.extract(lane);
                    }
                    at += comptime!(form.columns);
                }
            }
            let mean = sum_of_row(squares, column, form) / f32::cast_from(normed * lanes);
            scale = 1.0 / (mean + eps).sqrt();
        }
        Head { first, normed, scale, still, rotation: row / heads * pairs, form }
    }

    /// A vector of the head, normed and rotated.
    pub(crate) fn values<E: Float, N: Size>(
        &self,
        x: &[Vector<E, N>],
        weight: &[f32],
        cos: &[f32],
        sin: &[f32],
        column: usize,
    ) -> Vector<f32, N> {
        let lanes = N::value().comptime();
        let mut values = self.normed::<E, N>(x, weight, column);
        let channel = column * lanes;
        if channel >= self.still {
            let first = channel - self.still;
            if comptime!(lanes == 1) {
                let other = self.normed::<E, N>(x, weight, self.still + (first ^ 1)).extract(0usize);
                let own = values.extract(0usize);
                let pair = self.rotation + first / 2;
                let (c, s) = (cos[pair], angle_sine(sin[pair], self.form.inverse));
                let odd = first % 2 == 1;
                values.insert(0usize, own * c + other * select(odd, s, -s));
            } else {
                #[unroll]
                for i in 0..comptime!(lanes / 2) {
                    let pair = self.rotation + first / 2 + i;
                    let (c, s) = (cos[pair], angle_sine(sin[pair], self.form.inverse));
                    let (u, v) = (values.extract(comptime!(2 * i)), values.extract(comptime!(2 * i + 1)));
                    values.insert(comptime!(2 * i), u * c - v * s);
                    values.insert(comptime!(2 * i + 1), v * c + u * s);
                }
            }
        }
        values
    }

    /// A vector of the head after the norm.
    fn normed<E: Float, N: Size>(&self, x: &[Vector<E, N>], weight: &[f32], column: usize) -> Vector<f32, N> {
        let lanes = N::value().comptime();
        let mut values = Vector::<f32, N>::cast_from(x[self.first + column]);
        if comptime!(self.form.norm != Norm::None) {
            let is_normed = column < self.normed;
            if is_normed {
                #[unroll]
                for lane in 0..lanes {
                    let mut scale = self.scale;
                    if comptime!(self.form.norm == Norm::Weighted) {
                        scale *= weight[column * lanes + lane];
                    }
                    values.insert(lane, values.extract(lane) * scale);
                }
            }
        }
        values
    }
}

/// The sine of an angle, or of its opposite.
#[cube]
fn angle_sine(sine: f32, #[comptime] inverse: bool) -> f32 {
    if comptime!(inverse) { -sine } else { sine }
}

/// The sum over the units of a row. Called by all units of a cube.
#[cube]
fn sum_of_row(own: f32, column: usize, #[comptime] form: Form) -> f32 {
    let mut sums = Shared::<[f32]>::new_slice(form.units);
    let unit = UNIT_POS as usize;
    sums[unit] = own;
    sync_cube();
    let mut distance = comptime!(form.columns / 2).runtime();
    while distance > 0 {
        if column < distance {
            let other = sums[unit + distance];
            sums[unit] += other;
        }
        sync_cube();
        distance /= 2;
    }
    sums[unit - column]
}

/// Queries of DeepSeek-V4, its keys, and its outputs; latents of DeepSeek-V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let device = Arch::Sm90a.properties();
    let entry = |name, kind: FloatKind, (norm, norm_turned), inverse, address| {
        let elem = ElemType::Float(kind);
        let (dim, vector) = RowGrid::cube(&device, &[448, 64], elem.size());
        let form = Form { norm, norm_turned, inverse, columns: dim.x as usize, units: dim.num_elems() as usize };
        Entry::of(
            kind,
            name,
            form!(norm_rope_kernel, dim, [address, vector, _, _, _, _, _, 1, 1, 1, 1, 1.0, form, elem]),
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
