//! Whether all lanes of a warp come together to each exchange among them.
//!
//! A `SHFL` (or vote) of lanes that have parted gives some lanes the value of one that is elsewhere. ptxas waits for all lanes
//! that a mask names, where it cannot see that they are together; with a mask of the lanes that happen to be there
//! (`__activemask`), or with one that not all its lanes come to, nobody waits. So this follows the lanes through the machine code:
//!
//! - They part at a branch whose condition may differ between lanes ([`Values`] says which do).
//! - They are together again as at `BSSY` after its `BSYNC`, if none has left by `BREAK`; after a `WARPSYNC` of all 32; where
//!   `BRA.DIV`, given all 32, does not branch; and inside `WARPSYNC.COLLECTIVE` of all 32.
//! - ptxas makes of an atomic operation of all lanes a sum by `SHFL` and one atomic operation, behind a branch that compares the
//!   lanes that are there (`VOTE.ANY` of `PT`) with all 32: where it does not branch, they are together.
//! - A lane that has ended, while others go on to a `SHFL`, has no value for them.
//!
//! It errs on the side of lanes that part.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::sass::{Instruction, Kind, Operand, Program};
use super::values::{Value, Values};

/// All lanes.
const ALL: u32 = u32::MAX;
/// Functions that call functions that call functions.
const DEPTH: usize = 4;

/// Exchanges, and those of them to which not all lanes come together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Convergence {
    /// `SHFL` and votes that were looked at.
    pub exchanges: usize,
    /// What is wrong where.
    pub violations: Vec<String>,
}

/// Follows the lanes through machine code. `rows_are_planes`: the first dimension of a cube is a multiple of 32.
pub(super) fn check(program: &Program, rows_are_planes: bool) -> Convergence {
    let mut flow = Flow {
        program,
        is_target: program.is_target(),
        violations: BTreeMap::new(),
        ends: BTreeSet::new(),
        exchanges: BTreeMap::new(),
    };
    flow.run(0, Warp::new(Values::new(rows_are_planes)), 0);
    flow.ended_before();
    let text = |(address, reason): (&u32, &String)| format!("{address:#06x}: {reason}");
    Convergence { exchanges: flow.exchanges.len(), violations: flow.violations.iter().map(text).collect() }
}

/// What is known of a warp at an instruction.
#[derive(Debug, Clone, PartialEq)]
struct Warp {
    /// Branches at which lanes have parted who have not come back. Empty: all are together.
    parted: BTreeSet<u32>,
    /// The same at the `BSSY` of each barrier.
    saved: [BTreeSet<u32>; 16],
    /// The same at the last `WARPSYNC.COLLECTIVE`, which brings them together for what comes before `ENDCOLLECTIVE` alone.
    apart: BTreeSet<u32>,
    /// All 32 are here, not only all that have not ended.
    is_full: bool,
    values: Values,
}

impl Warp {
    fn new(values: Values) -> Self {
        Self { parted: BTreeSet::new(), saved: Default::default(), apart: BTreeSet::new(), is_full: false, values }
    }

    /// What is known where it may be this or the other. Whether that is less than before.
    fn join(&mut self, other: &Self) -> bool {
        let mut changed = false;
        let own = [&mut self.parted, &mut self.apart].into_iter().chain(&mut self.saved);
        for (own, other) in own.zip([&other.parted, &other.apart].into_iter().chain(&other.saved)) {
            let before = own.len();
            own.extend(other);
            changed |= own.len() > before;
        }
        changed |= self.is_full && !other.is_full;
        self.is_full &= other.is_full;
        self.values.join(&other.values, !self.parted.is_empty()) || changed
    }

    fn part(&mut self, at: u32) {
        self.parted.insert(at);
        self.is_full = false;
    }
}

struct Flow<'a> {
    program: &'a Program,
    is_target: Vec<bool>,
    violations: BTreeMap<u32, String>,
    /// Branches after which some lanes ended.
    ends: BTreeSet<u32>,
    /// Exchanges, and whether all 32 lanes are known to be there.
    exchanges: BTreeMap<u32, bool>,
}

/// Where a warp goes from an instruction.
enum Next {
    Onward,
    To(Vec<(usize, Warp)>),
    Returns(usize),
}

impl Flow<'_> {
    /// Follows a function from its first instruction on. Returns where it goes back to, and with what.
    fn run(&mut self, first: usize, warp: Warp, depth: usize) -> Vec<(usize, Warp)> {
        let mut known: HashMap<usize, Warp> = HashMap::new();
        let mut returns = Vec::new();
        let mut open = vec![(first, warp)];
        while let Some((start, warp)) = open.pop() {
            let mut warp = match known.get_mut(&start) {
                Some(old) => match old.join(&warp) {
                    true => old.clone(),
                    false => continue,
                },
                None => known.entry(start).or_insert(warp).clone(),
            };
            let mut index = start;
            while index < self.program.instructions.len() {
                match self.step(index, &mut warp, depth) {
                    Next::Onward if self.is_target[index + 1] => {
                        open.push((index + 1, warp));
                        break;
                    }
                    Next::Onward => index += 1,
                    Next::To(all) => {
                        open.extend(all);
                        break;
                    }
                    Next::Returns(to) => {
                        returns.push((to, warp));
                        break;
                    }
                }
            }
        }
        returns
    }

    fn step(&mut self, index: usize, warp: &mut Warp, depth: usize) -> Next {
        let program = self.program;
        let one = &program.instructions[index];
        match one.base() {
            "SHFL" | "VOTE" | "VOTEU" | "MATCH" => self.exchange(one, warp),
            "BSSY" => *saved(one, warp) = warp.parted.clone(),
            "BSYNC" => warp.parted = saved(one, warp).clone(),
            // The others wait for each other only.
            "BREAK" => saved(one, warp).extend([one.address]),
            "BMOV" if !one.has("CLEAR") || !one.operands[0].is_fixed() => {
                warp.saved.iter_mut().for_each(|saved| saved.extend([one.address]));
            }
            "WARPSYNC" => self.wait(one, warp),
            // Apart again, but none has ended before.
            "ENDCOLLECTIVE" if !std::mem::take(&mut warp.apart).is_empty() => warp.part(one.address),
            "EXIT" => return self.exit(index, warp),
            "BRA" | "BRX" => return branch(program, index, warp),
            "CALL" => return self.call(index, warp, depth),
            "RET" => match warp.values.of(&one.operands[0]).constant().and_then(|address| program.at(address)) {
                Some(to) => return Next::Returns(to),
                None => self.complain(one, "a return to an unknown place".into()),
            },
            _ => {}
        }
        warp.values.step(one, warp.parted.is_empty());
        Next::Onward
    }

    fn complain(&mut self, one: &Instruction, reason: String) {
        self.violations.entry(one.address).or_insert(format!("{}: {reason}", one.opcode));
    }

    fn exchange(&mut self, one: &Instruction, warp: &Warp) {
        // What counts the lanes that are there asks nothing of the others.
        let asks = |operand: &Operand| operand.kind == Kind::Predicate && !operand.is_fixed();
        let is_count = one.base().starts_with("VOTE") && !one.operands[1..].iter().any(asks);
        if is_count {
            return;
        }
        *self.exchanges.entry(one.address).or_insert(true) &= warp.is_full;
        if let Some(at) = warp.parted.first() {
            self.complain(one, format!("lanes may have parted at {at:#06x}"));
        } else if one.guard.as_ref().is_some_and(|guard| !warp.values.is_uniform(guard)) {
            self.complain(one, "not by all lanes".into());
        }
    }

    fn wait(&mut self, one: &Instruction, warp: &mut Warp) {
        let is_all =
            one.has("ALL") || one.operands.first().is_some_and(|mask| warp.values.of(mask).constant() == Some(ALL));
        let is_by_all = one.guard.as_ref().is_none_or(|guard| warp.values.is_uniform(guard));
        if is_all && is_by_all {
            let parted = std::mem::take(&mut warp.parted);
            if one.has("COLLECTIVE") {
                warp.apart = parted;
            }
        } else {
            self.complain(one, "waits for lanes of which not all are known to be named".into());
        }
    }

    fn exit(&mut self, index: usize, warp: &mut Warp) -> Next {
        let one = &self.program.instructions[index];
        self.ends.extend(&warp.parted);
        let Some(guard) = &one.guard else { return Next::To(Vec::new()) };
        if !warp.values.is_uniform(guard) {
            self.ends.insert(one.address);
            warp.is_full = false;
        }
        warp.values.assume(guard, false);
        Next::Onward
    }

    fn call(&mut self, index: usize, warp: &mut Warp, depth: usize) -> Next {
        let one = &self.program.instructions[index];
        let [to] = self.program.targets(one)[..] else {
            self.complain(one, "a call of an unknown function".into());
            return Next::To(Vec::new());
        };
        // ptxas writes some branches as calls of a place in the same function.
        if one.names_label() {
            return branch(self.program, index, warp);
        }
        if depth == DEPTH || one.guard.is_some() {
            self.complain(one, "a call that is not followed".into());
            return Next::To(Vec::new());
        }
        Next::To(self.run(to, warp.clone(), depth + 1))
    }

    /// Exchanges that lanes may come to after others have ended.
    fn ended_before(&mut self) {
        let program = self.program;
        let mut reached = vec![false; program.instructions.len()];
        let mut open: Vec<usize> = self.ends.iter().filter_map(|&address| program.at(address)).collect();
        while let Some(index) = open.pop() {
            let one = &program.instructions[index];
            let ends = matches!(one.base(), "EXIT" | "BRA" | "BRX" | "RET") && one.guard.is_none();
            let unconditional = ends && !one.has("DIV") && !one.operands.iter().any(|one| one.kind == Kind::Predicate);
            let onward = (!unconditional).then_some(index + 1);
            for next in program.targets(one).into_iter().chain(onward) {
                if next < reached.len() && !std::mem::replace(&mut reached[next], true) {
                    open.push(next);
                }
            }
        }
        let late =
            self.exchanges.iter().filter(|(_, is_full)| !**is_full).filter_map(|(&address, _)| program.at(address));
        let late: Vec<usize> = late.filter(|&index| reached[index]).collect();
        for index in late {
            self.complain(&program.instructions[index], "lanes may have ended before".into());
        }
    }
}

/// What was saved for the barrier of an instruction.
fn saved<'a>(one: &Instruction, warp: &'a mut Warp) -> &'a mut BTreeSet<u32> {
    let number = one.barrier().unwrap_or(0);
    &mut warp.saved[number]
}

/// A branch: where it goes, and who goes along.
fn branch(program: &Program, index: usize, warp: &mut Warp) -> Next {
    let one = &program.instructions[index];
    let mut taken = warp.clone();
    let mut onward = warp.clone();
    let conditions = one.guard.iter().chain(one.operands.iter().filter(|operand| operand.kind == Kind::Predicate));
    let conditions: Vec<&Operand> = conditions.filter(|condition| !condition.is_fixed()).collect();
    let is_conditional = !conditions.is_empty() || one.has("DIV");
    let is_uniform = conditions.iter().all(|condition| warp.values.is_uniform(condition)) && is_direct(one, warp);
    if one.has("DIV") {
        // Taken by lanes that have parted, or if some have ended.
        if all_named(one, warp) {
            onward.parted.clear();
        }
    } else if let [condition] = conditions[..]
        && let Value::AllHere(value) = warp.values.of(condition)
    {
        let all = if value == condition.negated { &mut onward } else { &mut taken };
        all.parted.clear();
        all.is_full = true;
    } else if !one.has("U") && !is_uniform {
        taken.part(one.address);
        onward.part(one.address);
    }
    if let ([condition], false) = (&conditions[..], one.has("U")) {
        taken.values.assume(condition, true);
        onward.values.assume(condition, false);
    }
    let mut next: Vec<_> = program.targets(one).into_iter().map(|to| (to, taken.clone())).collect();
    if is_conditional {
        next.push((index + 1, onward));
    }
    Next::To(next)
}

/// Whether the mask of `BRA.DIV` names all lanes; without one it does.
fn all_named(one: &Instruction, warp: &Warp) -> bool {
    let Some(mask) = one.operands.first().filter(|operand| operand.kind == Kind::Register) else { return true };
    if mask.is_fixed() { mask.negated } else { warp.values.of(mask).constant() == Some(ALL) }
}

/// Whether a branch goes to one place, or where all lanes of the warp say.
fn is_direct(one: &Instruction, warp: &Warp) -> bool {
    one.base() != "BRX" || warp.values.is_uniform(&one.operands[0])
}

#[cfg(test)]
mod tests;
