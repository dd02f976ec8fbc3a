//! Weights that stay in blocks.

use mla_ops::{BlockFormat, MlaError, WeightBlocks};

use super::{Source, WeightLoader};
use crate::weights::WeightRole;
use crate::weights::asked::Asked;
use crate::weights::packed::{BlockFilling, WeightStorage, with_scale};
use crate::weights::random::{Drawing, RandomInit, whole_blocks, whole_blocks_of_rows};
use crate::weights::read::Matrices;
use crate::weights::spec::Listed;
use crate::weights::stored::{Stored, is_routed_expert};
use crate::{WeightReport, WrongQuantization};

impl<'a> WeightLoader<'a> {
    /// Codes and scales of what is asked for, and the sizes of the matrices, where all of it is in the files, in one format, and can
    /// stay so. Nothing is recorded otherwise, but for numbers that are wrong.
    pub(super) fn load_blocks(&mut self, asked: &Asked<'_>) -> Option<(WeightBlocks, [usize; 3])> {
        if self.storage == WeightStorage::Dense {
            return None;
        }
        let checkpoint = match self.source {
            Source::Files(checkpoint) => checkpoint,
            Source::Random(init) => return self.draw_blocks(asked, Some(init)),
            Source::Unwritten => return self.draw_blocks(asked, None),
            Source::Nothing => return None,
        };
        // What will be refused, and what is listed, is looked at by the way of dense weights.
        if self.listing.is_some() || !self.report.is_empty() {
            return None;
        }
        let (own, wrong) = asked.own(&self.parallel);
        let mut unseen = WeightReport::default();
        let look =
            |name: &&str| Stored::find(checkpoint, &self.in_files(name), asked.each, self.quantization, &mut unseen);
        let found: Vec<Option<Stored<'a>>> = asked.names.iter().map(look).collect();
        let format = one_format(asked, &found)?;
        let cuts = |stored: &Stored<'_>| stored.cuts_blocks(asked.each, &own.part).is_some();
        if wrong.is_some() || found.iter().flatten().any(cuts) {
            return None;
        }
        for stored in found.iter().flatten() {
            self.asked_for.extend(stored.names());
        }
        let stored: Vec<Stored<'a>> = found.into_iter().flatten().collect();
        let matrices = Matrices { checkpoint, stored: &stored[own.names.clone()], each: asked.each, part: &own.part };
        let of_others = stored.iter().map(Stored::len).sum::<u64>() - matrices.bytes();
        self.total_bytes = self.total_bytes.saturating_sub(of_others);
        let [rows, columns] = own.part.window(asked.each).map(|range| range.len());
        let mut filling = BlockFilling::new(&self.device, format, [own.names.len(), rows, columns]);
        for stored in matrices.stored {
            match (stored.check(checkpoint, matrices.columns(), self.dtype), &stored.scale) {
                (Ok(()), Some(scale)) if self.report.is_empty() => {
                    filling.take(&matrices, stored, scale);
                    self.advance(matrices.share(stored), stored.name);
                }
                (Ok(()), _) => {}
                (Err(wrong), _) => self.report.wrong_quantization.push(wrong),
            }
        }
        if !self.report.is_empty() {
            // The way of dense weights counts them again.
            self.total_bytes += of_others;
            return None;
        }
        let matrix_rows = asked.matrices?.count(own.names.len(), rows);
        let (blocks, sizes) = filling.finish(matrix_rows, self.dtype)?;
        Some((self.checked_blocks(blocks), sizes))
    }

    /// The format of what no files have: as it is published, where the configuration has blocks and rows are whole words.
    pub(super) fn format_without_files(&self, asked: &Asked<'_>) -> Option<BlockFormat> {
        let (published, quantization, &[_, columns]) = (self.published?, self.quantization?, asked.each) else {
            return None;
        };
        let has_files = matches!(self.source, Source::Files(_));
        let alike = asked.names.iter().all(|name| published.is_projection(name));
        if has_files || !alike || asked.matrices.is_none() || asked.role != WeightRole::Weight {
            return None;
        }
        let is_fp4 = quantization.fp4_experts && asked.names.iter().all(|name| is_routed_expert(name));
        match is_fp4 {
            true => columns.is_multiple_of(8).then_some(BlockFormat::Fp4),
            false => (quantization.block == [128, 128] && columns.is_multiple_of(4)).then_some(BlockFormat::Fp8),
        }
    }

    /// Codes and scales that are drawn, or memory that nobody has written.
    fn draw_blocks(&mut self, asked: &Asked<'_>, init: Option<RandomInit>) -> Option<(WeightBlocks, [usize; 3])> {
        let format = self.format_without_files(asked)?;
        let (own, wrong) = asked.own(&self.parallel);
        let [rows, columns] = own.part.window(asked.each);
        let (first, whole) = (asked.names.first()?, [asked.names.len(), asked.each[0], asked.each[1]]);
        if wrong.is_some()
            || !whole_blocks(format, &columns, whole[2])
            || !whole_blocks_of_rows(format, &rows, whole[1])
        {
            return None;
        }
        let own = [own.names, rows, columns];
        let sizes = own.each_ref().map(|range| range.len());
        let drawing = Drawing { device: &self.device, format, whole, own };
        let codes = match init {
            Some(init) => drawing.codes(init, first),
            None => drawing.unwritten(),
        };
        let scale = init.map_or(1.0, |init| init.block_scale(format, whole[2]));
        let matrix_rows = asked.matrices?.count(sizes[0], sizes[1]);
        let drawn = with_scale(codes, scale, (format, sizes), matrix_rows, self.dtype);
        if init.is_none() {
            return Some(drawn);
        }
        let all = Listed::block_bytes(format, &[whole[1], whole[2]]) * whole[0] as u64;
        self.advance(all, first);
        let (blocks, sizes) = drawn;
        Some((self.checked_blocks(blocks), sizes))
    }

    /// A weight of blocks. What is wrong with them is recorded.
    pub(super) fn of_blocks<T>(&mut self, name: &str, weight: Result<T, MlaError>) -> Option<T> {
        weight
            .map_err(|error| {
                let (actual, expected) = (format!("is no weight in blocks: {error}"), "codes and scales".into());
                self.report.wrong_quantization.push(WrongQuantization { name: name.into(), actual, expected });
            })
            .ok()
    }
}

/// The format in which all of these can stay, where they may.
pub(super) fn one_format(asked: &Asked<'_>, found: &[Option<Stored<'_>>]) -> Option<BlockFormat> {
    asked.matrices.filter(|_| asked.role == WeightRole::Weight)?;
    let mut formats = found.iter().map(|stored| stored.as_ref().and_then(Stored::block_format));
    let first = formats.next()??;
    formats.all(|format| format == Some(first)).then_some(first)
}
