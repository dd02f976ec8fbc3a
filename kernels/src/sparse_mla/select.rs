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
        needs: "TMA and tcgen05 of a Blackwell of data centers; f16 or bf16, dense rows of 512 or 576 channels, values of 512",
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
    let dense = [Some(sizes.rows), sizes.second_rows].into_iter().flatten().all(|rows| rows == RowFormat::Dense);
    (blackwell && dense).then(|| form_of(sizes)).flatten()
}

#[cfg(feature = "cuda")]
fn sm90_form(client: &Client, sizes: &SparseMlaSizes) -> Option<Form> {
    let hopper = client.properties().identity.fingerprint == "ptx_sm90";
    let form = hopper.then(|| form_of(sizes)).flatten()?;
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

/// Whether two cubes with so many blocks each should read FP8 rows for one another.
#[cfg(feature = "cuda")]
pub(super) fn pairs_pay(blocks: usize) -> bool {
    blocks >= FEWEST_OF_PAIR
}

/// Into how many splits the blocks of a tile go, of which there are at most so many: those that end first.
#[cfg(feature = "cuda")]
pub(super) fn splits(tiles: usize, blocks: usize, multiprocessors: usize) -> usize {
    let cost = |splits: usize| {
        let own = if splits == 1 { 0 } else { SPLIT_COST };
        (tiles * splits).div_ceil(multiprocessors) * (blocks.div_ceil(splits) + own)
    };
    (1..=blocks.max(1).min(multiprocessors)).min_by_key(|&splits| cost(splits)).unwrap_or(1)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::splits;

    #[test]
    fn tiles_are_split_where_multiprocessors_are_idle() {
        assert_eq!(splits(1, 10, 132), 10);
        assert_eq!(splits(1, 32, 132), 32);
        assert_eq!(splits(64, 32, 132), 2);
        assert_eq!(splits(128, 32, 132), 1);
        assert_eq!(splits(8192, 32, 132), 1);
        assert_eq!(splits(0, 0, 132), 1);
    }
}
