//! Which instructions run.
use std::sync::atomic::{AtomicU8, Ordering};

/// Which instructions of a kernel have run, over any number of launches.
#[derive(Debug)]
pub struct Coverage(Box<[AtomicU8]>);

impl Coverage {
    const RAN: u8 = 1;
    const HELD: u8 = 2;

    /// None of a kernel with so many instructions.
    pub fn new(instructions: usize) -> Self {
        // The end of the body is an instruction, too.
        Self((0..=instructions).map(|_| AtomicU8::new(0)).collect())
    }

    pub(crate) fn mark(&self, pc: u32, ran: bool, held: bool) {
        let bits = if ran { Self::RAN } else { 0 } | if held { Self::HELD } else { 0 };
        let Some(seen) = self.0.get(pc as usize) else { return };
        if seen.load(Ordering::Relaxed) & bits != bits {
            seen.fetch_or(bits, Ordering::Relaxed);
        }
    }

    fn has(&self, instruction: usize, bit: u8) -> bool {
        self.0.get(instruction).is_some_and(|seen| seen.load(Ordering::Relaxed) & bit != 0)
    }

    /// Whether any lane executed an instruction; its index counts from the kernel's first.
    pub fn ran(&self, instruction: usize) -> bool {
        self.has(instruction, Self::RAN)
    }

    /// Whether its guard kept any lane from executing it.
    pub fn held(&self, instruction: usize) -> bool {
        self.has(instruction, Self::HELD)
    }
}
