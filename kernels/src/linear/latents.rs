//! What a projection of heads can do beside its products, to save a launch: RoPE applied to the channels that it carries, and cubes behind
//! its own put latents into the cache. The bits are those of [`rope_write`](crate::rope_write).

use cubecl::prelude::*;

use crate::common::launch::is_row;
use crate::linear::LatentRows;
use crate::linear::grid::Tile;
use crate::norm_rope::Head;
use crate::rope_write::Forms;

/// What a launch does beside its products. Launches make `BesideArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum Beside<E: Float, V: Size> {
    /// Nothing.
    Nothing,
    /// RoPE is applied to carried channels, and there are cubes for latents.
    Latents(Latents<E, V>),
}

/// The rotations, and the latents with what their norm needs: see [`LatentRows`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Latents<E: Float, V: Size> {
    latent: &'static [Vector<E, V>],
    slots: &'static [i32],
    cache: &'static mut [E],
    weight: &'static [f32],
    cos: &'static [f32],
    sin: &'static [f32],
    pairs: usize,
    slot_count: usize,
    eps: f32,
    /// In vectors, as all widths.
    #[cube(comptime)]
    cache_width: usize,
    #[cube(comptime)]
    by_token: bool,
    #[cube(comptime)]
    forms: Forms,
}

impl LatentRows {
    /// For heads of `width` channels, vectors of `vector` and cubes of `units`; and how many cubes `tokens` need.
    pub(crate) fn bind<E: Float, V: Size>(
        self,
        [tokens, width, vector, units]: [usize; 4],
    ) -> (BesideArgs<E, V>, usize) {
        let Self { latent, weight, cos, sin, slots, cache, by_token, cache_width, pairs, slot_count, eps } = self;
        let cache_width = cache_width / vector;
        let forms = Forms::new(width / vector, cache_width, units);
        #[rustfmt::skip]
        let args = LatentsLaunch::new(
            latent, slots, cache, weight, cos, sin, pairs, slot_count, eps, cache_width, by_token, forms,
        );
        (BesideArgs::Latents(args), forms.latent.cubes(tokens))
    }
}

#[cube]
impl<E: Float, V: Size> Beside<E, V> {
    /// Copies the channels of a tile past those of the product behind its outputs: see [`Tile::carry`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn carry(
        &self,
        tile: &Tile,
        x: &[Vector<E, V>],
        out: &mut [E],
        vectors: usize,
        outputs: usize,
        carried: usize,
        #[comptime] units: usize,
    ) {
        #[comptime]
        match self {
            Beside::Nothing => tile.carry::<E, E, V>(x, out, vectors, outputs, carried, units),
            Beside::Latents(latents) => latents.apply_rope(tile, x, out, vectors, outputs, carried, units),
        }
    }

    /// Puts latents into the cache: cube number `cube` of those behind the products' own. Called by all units of it.
    pub(crate) fn write(&mut self, tokens: usize, cube: usize) {
        #[comptime]
        match self {
            Beside::Nothing => {}
            Beside::Latents(latents) => latents.write(tokens, cube),
        }
    }
}

#[cube]
impl<E: Float, V: Size> Latents<E, V> {
    #[allow(clippy::too_many_arguments)]
    fn apply_rope(
        &self,
        tile: &Tile,
        x: &[Vector<E, V>],
        out: &mut [E],
        vectors: usize,
        outputs: usize,
        carried: usize,
        #[comptime] units: usize,
    ) {
        let lanes = V::value().comptime();
        let (width, form) = (vectors + carried, comptime!(self.forms.q));
        let mut vector = UNIT_POS as usize;
        while vector < tile.count * carried {
            let (token, column) = (vector / carried, vector % carried);
            let row = tile.head_row(token);
            let head = Head::new::<E, V>(x, row, row + 1, tile.per_token, width, self.pairs, 0.0f32, column, form);
            let values = head.values::<E, V>(x, self.weight, self.cos, self.sin, vectors + column);
            #[unroll]
            for lane in 0..lanes {
                out[row * (outputs + carried * lanes) + outputs + column * lanes + lane] =
                    E::cast_from(values.extract(lane));
            }
            vector += units;
        }
    }

    fn write(&mut self, tokens: usize, cube: usize) {
        let lanes = V::value().comptime();
        let form = comptime!(self.forms.latent);
        let width = comptime!(self.cache_width).runtime();
        let row = cube * comptime!(form.heads()) + UNIT_POS as usize / form.columns;
        let mut column = UNIT_POS as usize % form.columns;
        let head =
            Head::new::<E, V>(self.latent, row, tokens, 1usize.runtime(), width, self.pairs, self.eps, column, form);
        let mut is_written = true.runtime();
        if comptime!(!self.by_token) {
            is_written = is_row(self.slots[min(row, tokens - 1)], self.slot_count);
        }
        if row < tokens && is_written {
            let mut first = row * width;
            if comptime!(!self.by_token) {
                first = usize::cast_from(self.slots[row]) * width;
            }
            while column < width {
                let values = head.values::<E, V>(self.latent, self.weight, self.cos, self.sin, column);
                #[unroll]
                for lane in 0..lanes {
                    self.cache[(first + column) * lanes + lane] = E::cast_from(values.extract(lane));
                }
                column += form.columns;
            }
        }
    }
}

/// V2-Lite's and V3's, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline<E: Float, V: Size>(units: usize) -> BesideArgs<E, V> {
    use crate::offline::buffer as any;
    let forms = Forms::new(24, 72, units);
    BesideArgs::Latents(LatentsLaunch::new(any(), any(), any(), any(), any(), any(), 1, 1, 1.0, 72, false, forms))
}
