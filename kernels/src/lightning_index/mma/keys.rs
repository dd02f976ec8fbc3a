//! Keys in shared memory: copied as they are stored, and taken out as operands of the matrix instruction.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::{Form, LANES, PIECE, PLANES};
use crate::cache_rows::{row_at, scale_at};
use crate::linear::packed::{e4m3_pairs_bf16, e4m3_pairs_f16, is_bf16};

/// The stages of all planes.
#[derive(CubeType)]
pub(super) struct Ring {
    /// `[planes, stages, pieces, units]`.
    pub(super) pieces: Shared<[Vector<u32, Const<PIECE>>]>,
    scales: Scales,
}

/// The scales of keys in the stages.
#[derive(CubeType)]
#[allow(dead_code, reason = "kernels alone have values of it")]
enum Scales {
    /// Dense keys have none.
    None,
    /// `[planes, stages, units]`: that of one of the two keys of a unit.
    OfKeys(Shared<[u32]>),
}

#[cube]
impl Ring {
    pub(super) fn new(#[comptime] form: Form) -> Ring {
        let stages = comptime!(PLANES * form.stages * LANES);
        Ring {
            pieces: Shared::new_aligned_slice(comptime!(stages * form.pieces()), 128usize),
            scales: if comptime!(form.has_scales()) {
                Scales::new_OfKeys(Shared::new_aligned_slice(stages, 128usize))
            } else {
                Scales::new_None()
            },
        }
    }

    /// A sum times the scale of one of this unit's keys, its own where the number of the unit is even.
    pub(super) fn with_scale(&self, sum: f32, turn: u32, #[comptime] form: Form) -> f32 {
        #[comptime]
        match &self.scales {
            Scales::None => sum,
            Scales::OfKeys(scales) => sum * f32::reinterpret(scales[scale_place(turn, form)]),
        }
    }
}

/// Starts to copy this unit's pieces of the 16 keys of a turn, two of which are this unit's.
#[cube]
pub(super) fn copy_keys(
    keys: &[u32],
    ring: &mut Ring,
    own_slot: u32,
    other_slot: u32,
    turn: u32,
    #[comptime] form: Form,
) {
    let pieces = keys.as_vectorized().with_vector_size::<Const<PIECE>>();
    let quad = (UNIT_POS_X % 4) as usize;
    let own = first_of(own_slot, form) + quad;
    let other = first_of(other_slot, form) + quad;
    let to = first_piece(turn, form);
    #[unroll]
    for piece in 0..comptime!(form.key_pieces()) {
        let (from, to) = (own + comptime!(4 * piece), to + comptime!(2 * piece * LANES));
        copy_async(&pieces[from..from + 1], &mut ring.pieces[to..to + 1], comptime!(PIECE as u32));
        let (from, to) = (other + comptime!(4 * piece), to + LANES);
        copy_async(&pieces[from..from + 1], &mut ring.pieces[to..to + 1], comptime!(PIECE as u32));
    }
    #[comptime]
    match &mut ring.scales {
        Scales::None => {}
        Scales::OfKeys(scales) => {
            let slot = select(quad.is_multiple_of(2), own_slot, other_slot);
            let (from, to) = (scale_at(slot as usize, 0usize, comptime!(form.layout())), scale_place(turn, form));
            copy_async(&keys[from..from + 1], &mut scales[to..to + 1], 1u32);
        }
    }
}

/// The first piece of a key.
#[cube]
fn first_of(slot: u32, #[comptime] form: Form) -> usize {
    if comptime!(form.has_scales()) {
        row_at(slot as usize, comptime!(form.layout())) / PIECE
    } else {
        slot as usize * comptime!(4 * form.chunks)
    }
}

/// Where this unit's pieces for a turn begin in the ring.
#[cube]
fn first_piece(turn: u32, #[comptime] form: Form) -> usize {
    stage(turn, form) * comptime!(form.pieces() * LANES) + UNIT_POS_X as usize
}

/// Where its scale is.
#[cube]
fn scale_place(turn: u32, #[comptime] form: Form) -> usize {
    stage(turn, form) * LANES + UNIT_POS_X as usize
}

/// The stage of a turn among those of all planes.
#[cube]
fn stage(turn: u32, #[comptime] form: Form) -> usize {
    UNIT_POS_Y as usize * form.stages + (turn % comptime!(form.stages as u32)) as usize
}

/// This unit's two keys of a turn, which have come, as operands of the matrix instruction: of 8 channels in each group of 32 four pairs,
/// of its own key and of the other.
#[cube]
pub(super) fn key_pairs<E: Float, NA: Size>(ring: &Ring, turn: u32, #[comptime] form: Form) -> Sequence<Vector<E, NA>> {
    let from = first_piece(turn, form);
    let mut pieces = Sequence::<Vector<u32, Const<PIECE>>>::new();
    #[unroll]
    for i in 0..comptime!(form.pieces()) {
        pieces.push(ring.pieces[from + comptime!(i * LANES)]);
    }
    let mut pairs = Sequence::<Vector<E, NA>>::new();
    #[unroll]
    for chunk in 0..form.chunks {
        #[unroll]
        for key in 0..2usize {
            if comptime!(form.has_scales()) {
                // Half of a piece is as many channels.
                let piece = pieces[comptime!(chunk / 2 * 2 + key)];
                #[unroll]
                for word in 0..2usize {
                    push_codes::<E, NA>(&mut pairs, piece.extract(comptime!(chunk % 2 * 2 + word)));
                }
            } else {
                let piece = pieces[comptime!(2 * chunk + key)];
                #[unroll]
                for i in 0..4usize {
                    pairs.push(Vector::<E, NA>::reinterpret(piece.extract(i)));
                }
            }
        }
    }
    pairs
}

/// The numbers of four codes, exact in f16 and bf16.
#[cube]
fn push_codes<E: Float, NA: Size>(pairs: &mut Sequence<Vector<E, NA>>, codes: u32) {
    let in_bf16 = is_bf16::<E>();
    if comptime!(in_bf16) {
        let (low, high) = e4m3_pairs_bf16(codes);
        pairs.push(Vector::<E, NA>::reinterpret(low));
        pairs.push(Vector::<E, NA>::reinterpret(high));
    } else {
        let (low, high) = e4m3_pairs_f16(codes);
        pairs.push(Vector::<E, NA>::reinterpret(low));
        pairs.push(Vector::<E, NA>::reinterpret(high));
    }
}
