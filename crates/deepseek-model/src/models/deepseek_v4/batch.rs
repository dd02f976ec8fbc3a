//! Where the new tokens of a forward pass of DeepSeek-V4 go and what they see: whole numbers, on the host.

use std::ops::Range;

use mla_ops::batch::{cu_seqlens, positions};
use mla_ops::cache::PagedCache;

use super::cache::{Place, V4Cache};
use super::schedule::CompressorSpec;
use crate::Result;
use crate::step::{Chunk, check_chunks};

/// New tokens of some sequences.
#[derive(Debug, Default)]
pub(super) struct Batch {
    sequences: Vec<Sequence>,
}

/// New tokens of a sequence.
#[derive(Debug)]
struct Sequence {
    place: Place,
    /// Among the tokens of all sequences.
    tokens: Range<usize>,
    pages: Vec<u32>,
    /// Snapshots of the state within the new tokens: the tokens of the sequence before each, and its row.
    marks: Vec<(usize, usize)>,
}

/// Of one kind of layer: entries that the new tokens complete, and how many they see.
#[derive(Debug)]
pub(super) struct EntryNumbers {
    /// As [`EntryStep::carried_slots`](super::step::EntryStep::carried_slots).
    pub(super) carried_slots: Vec<i32>,
    /// Entries of each sequence, whether it completes them or not: `n`.
    pub(super) completed: usize,
    /// As [`EntryStep::slots`](super::step::EntryStep::slots).
    pub(super) slots: Vec<i32>,
    /// Positions of the entries, `[B * n]`.
    pub(super) positions: Vec<i32>,
    /// Entries that each token sees, `[N]`.
    pub(super) visible: Vec<i32>,
}

impl Batch {
    /// The chunks' tokens; the states of their requests count them as computed.
    pub(super) fn begin(chunks: &[Chunk], cache: &mut V4Cache) -> Result<Self> {
        let mut batch = Self::default();
        for chunk in chunks {
            let (place, new) = (cache.begin(chunk.request, chunk.tokens.len())?, chunk.tokens.len());
            let marks = cache.marked(chunk.request, place.start..place.start + new);
            batch.push(place, chunk, cache.entries(), marks)?;
        }
        Ok(batch)
    }

    /// The chunks' tokens, of requests whose states nobody counts.
    pub(super) fn of_pages(chunks: &[Chunk], cache: &PagedCache) -> Result<Self> {
        check_chunks(chunks, cache)?;
        let mut batch = Self::default();
        for chunk in chunks {
            let start = cache.len(chunk.request)? - chunk.tokens.len();
            batch.push(Place { row: cache.row(chunk.request)? as usize, start }, chunk, cache, Vec::new())?;
        }
        Ok(batch)
    }

    fn push(&mut self, place: Place, chunk: &Chunk, cache: &PagedCache, marks: Vec<(usize, usize)>) -> Result<()> {
        let first = self.sequences.last().map_or(0, |sequence| sequence.tokens.end);
        let (tokens, pages) = (first..first + chunk.tokens.len(), cache.pages(chunk.request)?.to_vec());
        self.sequences.push(Sequence { place, tokens, pages, marks });
        Ok(())
    }

    /// Whether each sequence has one new token.
    pub(super) fn has_one_token_each(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.tokens.len() == 1)
    }

    /// Whether a sequence has tokens from before.
    pub(super) fn goes_on(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.place.start > 0)
    }

    /// New tokens of each sequence.
    pub(super) fn lens(&self) -> Vec<usize> {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).collect()
    }

    /// The sequences' rows in the states, `[B]`.
    pub(super) fn state_rows(&self) -> Vec<i32> {
        self.sequences.iter().map(|sequence| sequence.place.row as i32).collect()
    }

    /// Positions of the first new tokens, `[B]`.
    pub(super) fn starts(&self) -> Vec<i32> {
        self.sequences.iter().map(|sequence| sequence.place.start as i32).collect()
    }

    /// Positions of the new tokens, `[N]`.
    pub(super) fn positions(&self) -> Result<Vec<usize>> {
        let tokens: Vec<Range<usize>> = self.sequences.iter().map(Sequence::positions).collect();
        Ok(positions(&tokens)?)
    }

    /// `[B + 1]`.
    pub(super) fn cu_seqlens(&self) -> Result<Vec<i32>> {
        Ok(cu_seqlens(&self.lens())?)
    }

    /// The slots of the new tokens in a state with rings of `len` tokens, `[N]`; -1 for those that others of this step overwrite.
    pub(super) fn ring_slots(&self, len: usize) -> Vec<i32> {
        self.sequences.iter().flat_map(|sequence| sequence.ring_slots(len)).collect()
    }

    /// Of the new tokens those that snapshots take into rings of `len` tokens, and the slots there.
    pub(super) fn marked(&self, len: usize) -> [Vec<i32>; 2] {
        let of_sequence = |sequence: &'_ Sequence| {
            let (first, start) = (sequence.tokens.start, sequence.place.start);
            let of_mark = move |&(end, row): &(usize, usize)| {
                (end - len..end)
                    .map(move |position| ((first + position - start) as i32, (row * len + position % len) as i32))
            };
            sequence.marks.iter().flat_map(of_mark).collect::<Vec<_>>()
        };
        let (tokens, slots) = self.sequences.iter().flat_map(of_sequence).unzip();
        [tokens, slots]
    }

    /// The rows that each new token sees of its window: in the state, where each sequence has one new token; otherwise among copies
    /// of the sequences' windows, if there is anything in them, and the new keys after those. They go behind `seen`, `width` for each
    /// token, filled up with -1.
    pub(super) fn windows(&self, window: usize, width: usize, seen: &mut Vec<i32>) {
        let one_each = self.has_one_token_each();
        let first_new = if !one_each && self.goes_on() { self.sequences.len() * window } else { 0 };
        for (number, sequence) in self.sequences.iter().enumerate() {
            // The rows of positions: in the state, or in a copy of this sequence's window, and among the new keys.
            let block = if one_each { sequence.place.row } else { number };
            let start = if one_each { sequence.positions().end } else { sequence.place.start };
            for own in sequence.positions() {
                let (first, filled) = ((own + 1).saturating_sub(window), seen.len() + width);
                let kept = start.min(own + 1).saturating_sub(first);
                // By whole ranges: a prompt has a million rows.
                let (place, new) =
                    (first % window, first_new + sequence.tokens.start + (first + kept).saturating_sub(start));
                let (to_end, ring) = (kept.min(window - place), block * window);
                let mut put = |rows: Range<usize>| seen.extend(rows.start as i32..rows.end as i32);
                put(ring + place..ring + place + to_end);
                put(ring..ring + kept - to_end);
                put(new..new + own + 1 - first - kept);
                seen.resize(filled, -1);
            }
        }
    }

    /// The most rows that a new token sees of its window.
    pub(super) fn longest_window(&self, window: usize) -> usize {
        self.sequences.iter().map(|sequence| sequence.positions().end.min(window)).max().unwrap_or(0)
    }

    /// The entries that a compressor makes, so many of each sequence at least, in pages of so many.
    pub(super) fn entries(&self, of: &CompressorSpec, per_page: usize, least: usize) -> EntryNumbers {
        let rate = of.rate;
        let completed = self.sequences.iter().map(|sequence| sequence.completed(rate).len()).max().unwrap_or(0);
        let completed = completed.max(least);
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        for sequence in &self.sequences {
            let own = sequence.completed(rate);
            slots.extend(own.clone().map(|entry| sequence.entry_slot(entry, per_page)));
            slots.resize(slots.len() + completed - own.len(), -1);
            positions.extend((own.start..own.start + completed).map(|entry| (entry * rate) as i32));
        }
        let visible = self.sequences.iter().flat_map(Sequence::positions);
        EntryNumbers {
            carried_slots: self.ring_slots(of.carried_tokens()),
            completed,
            slots,
            positions,
            visible: visible.map(|position| ((position + 1) / rate) as i32).collect(),
        }
    }

    /// The slots of all entries of each sequence.
    pub(super) fn entry_slots(&self, rate: usize, per_page: usize) -> Vec<Vec<i32>> {
        let slots = |sequence: &Sequence| {
            let entries = 0..sequence.positions().end / rate;
            entries.map(|entry| sequence.entry_slot(entry, per_page)).collect()
        };
        self.sequences.iter().map(slots).collect()
    }

    /// The pages of each sequence.
    pub(super) fn pages(&self) -> Vec<Vec<i32>> {
        let pages = |sequence: &Sequence| sequence.pages.iter().map(|&page| page as i32).collect();
        self.sequences.iter().map(pages).collect()
    }

    /// The sequence of each new token, `[N]`.
    pub(super) fn owners(&self) -> Vec<i32> {
        (0..).zip(&self.sequences).flat_map(|(i, sequence)| sequence.tokens.clone().map(move |_| i)).collect()
    }
}

impl Sequence {
    /// Of the new tokens.
    fn positions(&self) -> Range<usize> {
        self.place.start..self.place.start + self.tokens.len()
    }

    fn ring_slots(&self, len: usize) -> impl Iterator<Item = i32> {
        let (row, end) = (self.place.row, self.positions().end);
        self.positions().map(
            move |position| {
                if position + len < end { -1 } else { (row * len + position % len) as i32 }
            },
        )
    }

    /// The entries that the new tokens complete.
    fn completed(&self, rate: usize) -> Range<usize> {
        self.place.start / rate..self.positions().end / rate
    }

    /// Where an entry of the sequence is in a pool with `per_page` of them in a page.
    fn entry_slot(&self, entry: usize, per_page: usize) -> i32 {
        (self.pages[entry / per_page] as usize * per_page + entry % per_page) as i32
    }
}

/// The lists one after the other, each filled up with -1 to so many numbers.
pub(super) fn filled_up(lists: &[Vec<i32>], len: usize) -> Vec<i32> {
    let mut values = Vec::with_capacity(lists.len() * len);
    for (number, list) in lists.iter().enumerate() {
        values.extend_from_slice(list);
        values.resize((number + 1) * len, -1);
    }
    values
}
