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

/// What a split costs beside its blocks, in blocks: its query, its partial result, and the merge of that in a launch of its own, or by the
/// cluster that has all splits of a tile.
#[cfg(feature = "cuda")]
const SPLIT_COST: usize = 2;
#[cfg(feature = "cuda")]
const CLUSTER_COST: usize = 1;

/// Cubes of clusters that merge, the largest first: the more cubes, the fewer rows each has.
#[cfg(feature = "cuda")]
const CLUSTERS: [usize; 3] = [8, 4, 2];

/// How the blocks of each tile are divided.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Division {
    pub splits: usize,
    /// Cubes of the cluster that has these splits and merges them; 1 where another launch does.
    pub cluster: usize,
}

#[cfg(feature = "cuda")]
impl Division {
    pub const WHOLE: Self = Self { splits: 1, cluster: 1 };
}

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

    /// How the blocks of each of so many tiles are divided: what ends first, and of what ends together whole tiles, then clusters.
    pub fn division(self, tiles: usize, blocks: usize, multiprocessors: usize, may_pair: bool) -> Division {
        if self == Self::OfManyHeads && may_pair {
            return Division {
                splits: splits(tiles / 2, blocks.div_ceil(2), (multiprocessors / 2).max(1)).0,
                cluster: 1,
            };
        }
        let (splits, cost) = splits(tiles, blocks, multiprocessors);
        let clusters = self.clusters(blocks).iter().filter(|&&cubes| tiles <= fitting(cubes, multiprocessors));
        let divisions = clusters.flat_map(|&cluster| (2..=cluster).map(move |splits| Division { splits, cluster }));
        let merged = divisions
            .filter(|division| !may_pair || !self.pay(blocks.div_ceil(division.splits)))
            .min_by_key(|division| merged_cost(blocks, division.splits))
            .filter(|division| merged_cost(blocks, division.splits) + usize::from(splits == 1) <= cost);
        merged.unwrap_or(Division { splits, cluster: 1 })
    }

    /// Clusters that may merge the splits of a tile. Two blocks end as soon in one cube.
    pub fn clusters(self, blocks: usize) -> &'static [usize] {
        if self == Self::OfFp8Rows && blocks > 2 { &CLUSTERS } else { &[] }
    }
}

/// Into how many splits the blocks of a tile go, of which there are at most so many, if a launch of its own merges them: those that end
/// first. And when they do.
#[cfg(feature = "cuda")]
fn splits(tiles: usize, blocks: usize, multiprocessors: usize) -> (usize, usize) {
    let cost = |splits: usize| {
        let own = if splits == 1 { 0 } else { SPLIT_COST };
        (tiles * splits).div_ceil(multiprocessors) * (blocks.div_ceil(splits) + own)
    };
    let splits = (1..=blocks.max(1).min(multiprocessors)).map(|splits| (splits, cost(splits)));
    splits.min_by_key(|&(_, cost)| cost).unwrap_or((1, cost(1)))
}

/// When the splits of a tile end that a cluster merges, all of which run at once.
#[cfg(feature = "cuda")]
fn merged_cost(blocks: usize, splits: usize) -> usize {
    blocks.div_ceil(splits) + CLUSTER_COST
}

/// How many clusters of so many cubes run at once, at least: those of a cluster are in one part of the GPU, some of whose
/// multiprocessors are left over. An H200, of 132, has room for some 66, 30 and 16.
#[cfg(feature = "cuda")]
fn fitting(cubes: usize, multiprocessors: usize) -> usize {
    match cubes {
        2 => multiprocessors / 2,
        4 => multiprocessors * 2 / 9,
        _ => multiprocessors / 9,
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::{Division, Pairs, splits};

    #[test]
    fn tiles_are_split_where_multiprocessors_are_idle() {
        assert_eq!(splits(1, 10, 132).0, 10);
        assert_eq!(splits(1, 32, 132).0, 32);
        assert_eq!(splits(64, 32, 132).0, 2);
        assert_eq!(splits(128, 32, 132).0, 1);
        assert_eq!(splits(8192, 32, 132).0, 1);
        assert_eq!(splits(0, 0, 132).0, 1);
    }

    #[test]
    fn clusters_merge_where_they_end_no_later() {
        let of = |tiles, blocks| Pairs::OfFp8Rows.division(tiles, blocks, 132, false);
        let merged = |splits, cluster| Division { splits, cluster };
        assert_eq!([0, 1, 2].map(|blocks| of(1, blocks)), [Division::WHOLE; 3]);
        assert_eq!(
            [of(1, 3), of(14, 3), of(15, 3), of(30, 3)],
            [merged(3, 8), merged(3, 8), merged(3, 4), Division::WHOLE]
        );
        assert_eq!([of(1, 10), of(14, 10), of(29, 10)], [merged(5, 8), merged(5, 8), merged(4, 4)]);
        // Four splits each fill the GPU sooner than clusters of two.
        assert_eq!([of(33, 10), of(64, 10), of(67, 10)], [merged(4, 1), merged(2, 2), Division::WHOLE]);
        assert_eq!([of(1, 32), of(64, 32)], [merged(32, 1), merged(2, 2)]);
        // A pair merges nothing.
        let pair = |blocks| Pairs::OfFp8Rows.division(2, blocks, 18, true);
        assert_eq!([pair(8), pair(64)], [merged(8, 8), merged(8, 1)]);
        assert_eq!(Pairs::OfManyHeads.division(1, 10, 132, false), merged(10, 1));
    }

    #[test]
    fn pairs_have_two_tiles_and_two_blocks_at_a_time() {
        let many = Pairs::OfManyHeads;
        assert_eq!([1, 2, 3, 4].map(|tiles| many.tiles(tiles)), [1, 2, 4, 4]);
        assert_eq!([1, 2, 3, 4].map(|tiles| Pairs::OfFp8Rows.tiles(tiles)), [1, 2, 3, 4]);
        assert!(!many.are_possible(1, false) && many.are_possible(2, false) && many.pay(1));
        assert!(!Pairs::OfFp8Rows.are_possible(2, false) && !Pairs::OfFp8Rows.are_possible(3, true));
        // A token fills half of the pairs with two blocks each.
        assert_eq!(many.division(2, 32, 148, true).splits, 16);
        assert_eq!(many.division(128, 32, 148, true).splits, 1);
        assert_eq!(many.division(1, 32, 148, false).splits, splits(1, 32, 148).0);
        assert_eq!(many.division(2, 3, 1, true).splits, 1);
        assert_eq!(Pairs::OfFp8Rows.division(128, 32, 132, true).splits, splits(128, 32, 132).0);
    }
}
