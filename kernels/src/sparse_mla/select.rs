//! Which kernel attends, and among how many cubes the blocks of a tile are split.

#[cfg(feature = "cuda")]
use cubecl::prelude::*;

use super::SparseMlaSizes;
#[cfg(feature = "cuda")]
use super::form::Stored;
#[cfg(feature = "cuda")]
use crate::cache_rows::RowFormat;
use crate::common::select::Table;
#[cfg(feature = "cuda")]
use crate::common::select::{Path, Variant};
#[cfg(feature = "cuda")]
use crate::tiles::form::{Form, TILE_WIDTH, VALUE_WIDTH};

/// Tiles of 64 channels, and their element. Other devices have none.
#[cfg(not(feature = "cuda"))]
pub(super) type Form = ();

/// The implementations, the fastest first.
pub(super) const TABLE: Table<SparseMlaSizes, Form> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm100,
        needs: "TMA and tcgen05 of a Blackwell of data centers; f16 or bf16, rows of 512 or 576 channels, values of 512; bf16 for FP8 rows, \
                of 512 + 64 channels or, with scales behind the page, of 448 + 64",
        form: sm100_form,
        #[cfg(feature = "offline")]
        offline: super::sm100::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "wgmma of a Hopper; f16 or bf16, rows of 512 or 576 channels, values of 512; bf16 for FP8 rows, of 512 + 64 channels or, \
                with scales behind the page, of 448 + 64",
        form: sm90_form,
        #[cfg(feature = "offline")]
        offline: super::sm90::offline,
    },
]);

#[cfg(feature = "cuda")]
fn sm100_form(client: &Client, sizes: &SparseMlaSizes) -> Option<Form> {
    let blackwell = client.properties().identity.fingerprint == "ptx_sm100";
    blackwell.then(|| form_of_rows(sizes)).flatten()
}

#[cfg(feature = "cuda")]
fn sm90_form(client: &Client, sizes: &SparseMlaSizes) -> Option<Form> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    hopper.then(|| form_of_rows(sizes)).flatten()
}

/// The tiles for a problem, if its rows are stored in a way that the kernels read.
#[cfg(feature = "cuda")]
fn form_of_rows(sizes: &SparseMlaSizes) -> Option<Form> {
    let form = form_of(sizes)?;
    let rows = |rows: RowFormat| Stored::of(rows, form.bf16).is_some() && rows.fits(sizes.key_width);
    (rows(sizes.rows) && sizes.second_rows.is_none_or(rows)).then_some(form)
}

/// The tiles for a problem, if the tensor cores take it in such.
#[cfg(feature = "cuda")]
fn form_of(sizes: &SparseMlaSizes) -> Option<Form> {
    use cubecl::ir::FloatKind;
    let bf16 = match sizes.elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let widths = sizes.value_width == VALUE_WIDTH && matches!(sizes.key_width, 512 | 576);
    widths.then_some(Form { tiles: sizes.key_width / TILE_WIDTH, box_keys: 1, bf16, causal: false })
}

/// What a split costs beside its blocks, in blocks: its query, its partial result, and the merge of that.
#[cfg(feature = "cuda")]
const SPLIT_COST: usize = 2;

/// Blocks of a tile from which on two cubes with heads of a token read FP8 rows for one another: fewer take less time than the two to meet.
#[cfg(feature = "cuda")]
const FEWEST_OF_PAIR: usize = 8;

/// When two cubes work together, which have the heads of two tiles of a token.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pairs {
    /// Where they read FP8 rows for one another.
    OfFp8Rows,
    /// Where one cube has not all heads. They compute two blocks at a time.
    OfManyHeads,
}

#[cfg(feature = "cuda")]
impl Pairs {
    /// Tiles of a token that has heads for so many: the last one may have none.
    pub fn tiles(self, tiles: usize) -> usize {
        if self == Self::OfManyHeads && tiles > 1 { tiles.next_multiple_of(2) } else { tiles }
    }

    /// Whether so many tiles may be those of pairs.
    pub fn are_possible(self, tiles: usize, fp8: bool) -> bool {
        tiles.is_multiple_of(2) && (fp8 || self == Self::OfManyHeads)
    }

    /// Whether those with so many blocks should be.
    pub fn pay(self, blocks: usize) -> bool {
        self == Self::OfManyHeads || blocks >= FEWEST_OF_PAIR
    }

    /// Into how many [`splits`] the blocks of each of so many tiles go.
    pub fn splits(self, tiles: usize, blocks: usize, multiprocessors: usize, may_pair: bool) -> usize {
        match self == Self::OfManyHeads && may_pair {
            true => splits(tiles / 2, blocks.div_ceil(2), (multiprocessors / 2).max(1)),
            false => splits(tiles, blocks, multiprocessors),
        }
    }
}

/// Into how many splits the blocks of a tile go, of which there are at most so many: those that end first.
#[cfg(feature = "cuda")]
fn splits(tiles: usize, blocks: usize, multiprocessors: usize) -> usize {
    let cost = |splits: usize| {
        let own = if splits == 1 { 0 } else { SPLIT_COST };
        (tiles * splits).div_ceil(multiprocessors) * (blocks.div_ceil(splits) + own)
    };
    (1..=blocks.max(1).min(multiprocessors)).min_by_key(|&splits| cost(splits)).unwrap_or(1)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::{Pairs, splits};

    #[test]
    fn tiles_are_split_where_multiprocessors_are_idle() {
        assert_eq!(splits(1, 10, 132), 10);
        assert_eq!(splits(1, 32, 132), 32);
        assert_eq!(splits(64, 32, 132), 2);
        assert_eq!(splits(128, 32, 132), 1);
        assert_eq!(splits(8192, 32, 132), 1);
        assert_eq!(splits(0, 0, 132), 1);
    }

    #[test]
    fn pairs_have_two_tiles_and_two_blocks_at_a_time() {
        let many = Pairs::OfManyHeads;
        assert_eq!([1, 2, 3, 4].map(|tiles| many.tiles(tiles)), [1, 2, 4, 4]);
        assert_eq!([1, 2, 3, 4].map(|tiles| Pairs::OfFp8Rows.tiles(tiles)), [1, 2, 3, 4]);
        assert!(!many.are_possible(1, false) && many.are_possible(2, false) && many.pay(1));
        assert!(!Pairs::OfFp8Rows.are_possible(2, false) && !Pairs::OfFp8Rows.are_possible(3, true));
        // A token fills half of the pairs with two blocks each.
        assert_eq!(many.splits(2, 32, 148, true), 16);
        assert_eq!(many.splits(128, 32, 148, true), 1);
        assert_eq!(many.splits(1, 32, 148, false), splits(1, 32, 148));
        assert_eq!(many.splits(2, 3, 1, true), 1);
        assert_eq!(Pairs::OfFp8Rows.splits(128, 32, 132, true), splits(128, 32, 132));
    }
}
