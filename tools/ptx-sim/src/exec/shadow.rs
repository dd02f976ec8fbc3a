//! Who last read and wrote shared memory.
//!
//! Each word of four bytes has a number that stands for a state; equal histories share a state. A warp's access meets
//! the same few states in all of its words, so the step from state to state is remembered and mostly two comparisons.
use super::order::{Agent, Order, Proxy, Stamp};
use std::collections::HashMap;

/// Bytes of a word.
const WORD: usize = 4;
/// All bytes of a word.
const WHOLE: u32 = (1 << WORD) - 1;
/// States before those that no word has any more are dropped.
const MOST_STATES: usize = 1 << 15;
const REMEMBERED: usize = 16;

/// An access. Atomic ones and those with `.volatile` or `.relaxed` do not conflict with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    Atomic,
    StrongRead,
    StrongWrite,
}

/// Why an access is wrong.
pub(super) enum Conflict {
    Uninitialised,
    /// The bytes are an mbarrier.
    Mbarrier,
    Unordered {
        earlier: &'static str,
        stamp: Stamp,
    },
    Unfenced {
        stamp: Stamp,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Word {
    write: Option<Stamp>,
    /// Reads since that are not ordered among each other, sorted.
    reads: Vec<Stamp>,
    /// Atomic accesses since, likewise.
    atomics: Vec<Stamp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    Word(Word),
    /// States of the bytes, where they differ.
    Bytes([u32; WORD]),
    Mbarrier,
}

#[derive(Clone, Copy)]
struct Step {
    key: u32,
    from: u32,
    to: u32,
}

/// The states of all words.
pub(super) struct Shadow {
    words: Vec<u32>,
    states: Vec<State>,
    ids: HashMap<State, u32>,
    steps: [Step; REMEMBERED],
    version: u32,
}

const NO_STEP: Step = Step { key: u32::MAX, from: 0, to: 0 };

impl Shadow {
    /// All bytes unwritten, or written before the start by no agent.
    pub fn new(bytes: usize, initialised: bool) -> Self {
        let no_agent = Stamp { agent: Agent::warp(0), epoch: 0 };
        let write = initialised.then_some(no_agent);
        let first = State::Word(Word { write, reads: Vec::new(), atomics: Vec::new() });
        let ids = HashMap::from([(first.clone(), 0)]);
        let words = vec![0; bytes.div_ceil(WORD)];
        Self { words, states: vec![first], ids, steps: [NO_STEP; REMEMBERED], version: 0 }
    }

    /// Checks and notes an access; an error comes with the byte.
    pub fn touch(
        &mut self,
        order: &Order,
        by: Agent,
        access: Access,
        range: std::ops::Range<usize>,
    ) -> Result<(), (usize, Conflict)> {
        if self.version != order.version {
            self.version = order.version;
            self.steps = [NO_STEP; REMEMBERED];
        }
        if range.start.is_multiple_of(WORD) && range.end.is_multiple_of(WORD) {
            for word in range.start / WORD..range.end / WORD {
                self.step(order, by, access, word, WHOLE)?;
            }
            return Ok(());
        }
        let mut at = range.start;
        while at < range.end {
            let (word, first) = (at / WORD, at % WORD);
            let last = (range.end - word * WORD).min(WORD);
            self.step(order, by, access, word, (1 << last) - (1 << first))?;
            at = (word + 1) * WORD;
        }
        Ok(())
    }

    #[inline]
    fn step(
        &mut self,
        order: &Order,
        by: Agent,
        access: Access,
        word: usize,
        bytes: u32,
    ) -> Result<(), (usize, Conflict)> {
        let key = (by.index() as u32) << 8 | (access as u32) << 4 | bytes;
        let from = self.words[word];
        let known = self.steps[from as usize % REMEMBERED];
        if known.key == key && known.from == from {
            self.words[word] = known.to;
            return Ok(());
        }
        self.new_step(order, by, access, word, bytes).map_err(|(byte, conflict)| (word * WORD + byte, conflict))
    }

    #[cold]
    fn new_step(
        &mut self,
        order: &Order,
        by: Agent,
        access: Access,
        word: usize,
        bytes: u32,
    ) -> Result<(), (usize, Conflict)> {
        let from = self.words[word];
        let parts = match &self.states[from as usize] {
            State::Bytes(parts) => *parts,
            _ => [from; WORD],
        };
        let mut new = parts;
        for byte in (0..WORD).filter(|b| bytes >> b & 1 == 1) {
            // Neighbours mostly go the same way.
            if byte > 0 && bytes >> (byte - 1) & 1 == 1 && parts[byte] == parts[byte - 1] {
                new[byte] = new[byte - 1];
                continue;
            }
            let after = self.after(order, by, access, parts[byte]).map_err(|conflict| (byte, conflict))?;
            new[byte] = self.id(after);
        }
        let to = if new.iter().all(|n| *n == new[0]) { new[0] } else { self.id(State::Bytes(new)) };
        self.words[word] = to;
        let key = (by.index() as u32) << 8 | (access as u32) << 4 | bytes;
        self.steps[from as usize % REMEMBERED] = Step { key, from, to };
        if self.states.len() > MOST_STATES {
            self.collect();
        }
        Ok(())
    }

    /// The state of a byte after an access.
    fn after(&self, order: &Order, by: Agent, access: Access, from: u32) -> Result<State, Conflict> {
        let State::Word(old) = &self.states[from as usize] else { return Err(Conflict::Mbarrier) };
        let is_read = matches!(access, Access::Read | Access::StrongRead | Access::Atomic);
        if is_read && old.write.is_none() {
            return Err(Conflict::Uninitialised);
        }
        let strong = !matches!(access, Access::Read | Access::Write);
        let atomics = old.atomics.iter().filter(|_| !strong);
        for stamp in old.write.iter().chain(atomics) {
            let ordered = if access == Access::Write { order.over(by, *stamp) } else { order.seen(by, *stamp) };
            if !ordered {
                return Err(Conflict::Unordered { earlier: "write", stamp: *stamp });
            }
            if order.proxy(by) == Proxy::Async && !order.fenced(by, *stamp) {
                return Err(Conflict::Unfenced { stamp: *stamp });
            }
        }
        let writes = !matches!(access, Access::Read | Access::StrongRead);
        if writes && let Some(stamp) = old.reads.iter().find(|stamp| !order.over(by, **stamp)) {
            return Err(Conflict::Unordered { earlier: "read", stamp: *stamp });
        }
        let now = order.now(by);
        // What is ordered before this access is also before all that comes after it.
        let with = |stamps: &[Stamp]| {
            let mut left: Vec<Stamp> = stamps.iter().copied().filter(|s| !order.seen(by, *s)).chain([now]).collect();
            left.sort_unstable();
            left
        };
        Ok(State::Word(match access {
            Access::Read => Word { reads: with(&old.reads), ..old.clone() },
            // What is written without an order to it may be wrong, but is no race with the strong writes.
            Access::StrongRead => old.clone(),
            Access::Write => Word { write: Some(now), reads: Vec::new(), atomics: Vec::new() },
            Access::Atomic | Access::StrongWrite => {
                let no_agent = Stamp { agent: by, epoch: 0 };
                Word { write: old.write.or(Some(no_agent)), reads: Vec::new(), atomics: with(&old.atomics) }
            }
        }))
    }

    fn id(&mut self, state: State) -> u32 {
        if let Some(id) = self.ids.get(&state) {
            return *id;
        }
        let id = self.states.len() as u32;
        self.states.push(state.clone());
        self.ids.insert(state, id);
        id
    }

    /// Drops the states that no word has.
    fn collect(&mut self) {
        let states = std::mem::take(&mut self.states);
        self.ids.clear();
        self.steps = [NO_STEP; REMEMBERED];
        let mut ids = vec![None; states.len()];
        let mut words = std::mem::take(&mut self.words);
        for word in &mut words {
            let old = *word as usize;
            *word = match (ids[old], &states[old]) {
                (Some(id), _) => id,
                (None, State::Bytes(parts)) => {
                    let parts = parts.map(|part| self.id(states[part as usize].clone()));
                    self.id(State::Bytes(parts))
                }
                (None, state) => self.id(state.clone()),
            };
            ids[old] = Some(*word);
        }
        self.words = words;
    }

    /// Makes eight bytes an mbarrier; other accesses to them are errors.
    pub fn become_mbarrier(&mut self, at: usize) {
        let id = self.id(State::Mbarrier);
        self.words[at / WORD..][..2].fill(id);
    }

    /// Makes the bytes of an mbarrier ordinary ones, as this agent left them.
    pub fn leave_mbarrier(&mut self, order: &Order, by: Agent, at: usize) {
        let word = Word { write: Some(order.now(by)), reads: Vec::new(), atomics: Vec::new() };
        let id = self.id(State::Word(word));
        self.words[at / WORD..][..2].fill(id);
    }
}
