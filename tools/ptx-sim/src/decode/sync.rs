//! Control flow, barriers, warp-wide operations, mbarriers and fences (PTX ISA 9.7.12, 9.7.13).
use super::Decoder;
use super::atomic::atom;
use crate::error::Fault;
use crate::ir::{Atom, Op, Scope, ShuffleMode, VoteMode};

/// What may stand between an mbarrier operation's name and its type.
fn is_order(name: &str) -> bool {
    matches!(name, "shared" | "shared::cta" | "shared::cluster" | "release" | "acquire" | "relaxed" | "cta" | "cluster")
}

impl Decoder<'_, '_> {
    pub(super) fn sync(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        Ok(Some(match parts {
            ["bra"] | ["bra", "uni"] => Op::Branch { target: self.target()? },
            ["ret"] | ["ret", "uni"] | ["exit"] => Op::Exit,
            ["barrier", "cluster", "arrive", rest @ ..] => {
                let releases = match rest {
                    [] | ["aligned"] | ["release"] | ["release", "aligned"] => true,
                    ["relaxed"] | ["relaxed", "aligned"] => false,
                    _ => return Ok(None),
                };
                Op::ClusterArrive { releases, aligned: rest.contains(&"aligned") }
            }
            ["barrier", "cluster", "wait", rest @ ..]
                if matches!(rest, [] | ["aligned" | "acquire"] | ["acquire", "aligned"]) =>
            {
                Op::ClusterWait { aligned: rest.contains(&"aligned") }
            }
            ["bar" | "barrier", rest @ ..] if matches!(rest.first(), Some(&"sync" | &"arrive" | &"cta" | &"warp")) => {
                return self.barrier(rest);
            }
            ["shfl", "sync", mode @ ("up" | "down" | "bfly" | "idx"), "b32"] => {
                let mode = match *mode {
                    "up" => ShuffleMode::Up,
                    "down" => ShuffleMode::Down,
                    "bfly" => ShuffleMode::Bfly,
                    _ => ShuffleMode::Idx,
                };
                let (dst, in_range) = self.dest_pair()?;
                let (a, b, c) = (self.source(32)?, self.source(32)?, self.source(32)?);
                Op::Shuffle { mode, dst, in_range, a, b, c, mask: self.source(32)? }
            }
            ["vote", "sync", mode @ ("any" | "all" | "uni"), "pred"] => {
                let mode = match *mode {
                    "any" => VoteMode::Any,
                    "all" => VoteMode::All,
                    _ => VoteMode::Uni,
                };
                Op::Vote { mode, dst: self.pred()?.slot, a: self.pred()?, mask: self.source(32)? }
            }
            ["vote", "sync", "ballot", "b32"] => {
                Op::Ballot { dst: self.dest()?, a: self.pred()?, mask: self.source(32)? }
            }
            ["redux", "sync", op, t @ ("u32" | "s32" | "b32")] => {
                let Some(op) = atom(op).filter(|op| !matches!(op, Atom::Exch | Atom::Cas | Atom::Inc | Atom::Dec))
                else {
                    return Ok(None);
                };
                let (dst, a) = (self.dest()?, self.source(32)?);
                Op::Redux { op, signed: *t == "s32", dst, a, mask: self.source(32)? }
            }
            ["match", which @ ("any" | "all"), "sync", t @ ("b32" | "b64")] => {
                let (dst, pred) = self.dest_pair()?;
                let a = self.source(if *t == "b32" { 32 } else { 64 })?;
                Op::Match { all: *which == "all", dst, pred, a, mask: self.source(32)? }
            }
            ["trap"] => Op::Trap,
            ["activemask", "b32"] => Op::ActiveMask { dst: self.dest()? },
            ["mbarrier", rest @ .., "b64"] => return self.mbarrier(rest),
            ["setmaxnreg", kind @ ("inc" | "dec"), "sync", "aligned", "u32"] => {
                Op::Registers { count: self.immediate()? as u32, more: *kind == "inc" }
            }
            ["elect", "sync"] => {
                let (dst, Some(elected)) = self.dest_pair()? else { return Err(self.bad("no predicate")) };
                Op::Elect { dst, elected, mask: self.source(32)? }
            }
            _ => return self.fence(parts),
        }))
    }

    /// Fences, and waits that change nothing here.
    fn fence(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        Ok(Some(match parts {
            // Kernels run one after another.
            ["griddepcontrol", "launch_dependents" | "wait"] => Op::Nop,
            ["nanosleep", "u32"] => {
                self.source(32)?;
                Op::Nop
            }
            // Memory is sequentially consistent here, so that this order needs no fence.
            ["membar", "cta" | "gl" | "sys"] | ["fence", "acq_rel" | "sc", "cta" | "cluster" | "gpu" | "sys"] => {
                Op::Nop
            }
            ["fence", "mbarrier_init", "release", "cluster"] => Op::MbarrierInitFence,
            ["fence", "proxy", "async"] | ["fence", "proxy", "async", "shared::cta" | "shared::cluster"] => {
                Op::ProxyFence
            }
            // Not checked: the order of accesses to global memory.
            ["fence", "proxy", "async", "global"] => Op::Nop,
            _ => return Ok(None),
        }))
    }

    fn barrier(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let kind = match parts {
            ["warp", "sync"] => return Ok(Some(Op::WarpSync { mask: self.source(32)? })),
            [kind @ ("sync" | "arrive")] | ["cta", kind @ ("sync" | "arrive"), "aligned"] => kind,
            _ => return Ok(None),
        };
        let id = self.source(32)?;
        let count = if self.remaining() > 0 { Some(self.source(32)?) } else { None };
        Ok(Some(Op::BarSync { id, count, waits: *kind == "sync" }))
    }

    fn mbarrier(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let (name, mut rest) = match parts {
            ["arrive", "expect_tx", rest @ ..] => ("arrive.expect_tx", rest),
            [name @ ("test_wait" | "try_wait"), "parity", rest @ ..] => (*name, rest),
            [name @ ("init" | "inval" | "arrive" | "expect_tx" | "complete_tx"), rest @ ..] => (*name, rest),
            _ => return Ok(None),
        };
        // What is left out is a release, or an acquire, of the CTA.
        let scope = if rest.contains(&"cluster") { Scope::Cluster } else { Scope::Cta };
        let order = (!rest.contains(&"relaxed")).then_some(scope);
        while let [first, more @ ..] = rest {
            if !is_order(first) {
                return Ok(None);
            }
            rest = more;
        }
        Ok(Some(match name {
            "init" => Op::MbarrierInit { addr: self.address()?, count: self.source(32)? },
            "expect_tx" => Op::MbarrierExpect { addr: self.address()?, bytes: self.source(32)? },
            "complete_tx" => Op::MbarrierComplete { addr: self.address()?, bytes: self.source(32)? },
            "inval" => Op::MbarrierInvalidate { addr: self.address()? },
            "arrive" => {
                let (dst, addr) = (self.dest()?, self.address()?);
                let count = if self.remaining() > 0 { Some(self.source(32)?) } else { None };
                Op::MbarrierArrive { dst, addr, count, expect: None, releases: order }
            }
            "arrive.expect_tx" => {
                let (dst, addr) = (self.dest()?, self.address()?);
                Op::MbarrierArrive { dst, addr, count: None, expect: Some(self.source(32)?), releases: order }
            }
            "try_wait" | "test_wait" => {
                let (dst, addr, parity) = (self.pred()?.slot, self.address()?, self.source(32)?);
                // A time limit only makes the wait return false earlier.
                if self.remaining() > 0 {
                    self.source(32)?;
                }
                Op::MbarrierWait { dst, addr, parity, blocks: name == "try_wait", acquires: order }
            }
            _ => return Ok(None),
        }))
    }
}
