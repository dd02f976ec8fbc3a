//! What hardware may do and compilers' code mostly never meets.
use std::fmt;
use std::str::FromStr;

/// What a launch does of that. By default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Adversary {
    /// Lanes that a branch has parted come together only where they wait for each other: at `bar.warp.sync`, at other `.sync`
    /// instructions with a member mask, and at barriers. That they meet at the join of a branch PTX does not promise.
    pub lanes: bool,
    /// `mbarrier.try_wait` gives up early, at random.
    pub waits: bool,
    /// Arrivals of a commit to several CTAs come to each at its own time, and so do those of lanes' copies.
    pub arrivals: bool,
}

impl Adversary {
    /// Everything.
    pub const ALL: Self = Self { lanes: true, waits: true, arrivals: true };
}

impl fmt::Display for Adversary {
    /// ", against the program: lanes, waits", or nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [(self.lanes, "lanes"), (self.waits, "waits"), (self.arrivals, "arrivals")];
        let names: Vec<_> = all.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect();
        if names.is_empty() { Ok(()) } else { write!(f, ", against the program: {}", names.join(", ")) }
    }
}

impl FromStr for Adversary {
    type Err = String;

    /// `all`, or some of `lanes`, `waits`, `arrivals` with commas between.
    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').filter(|word| !word.is_empty()).try_fold(Self::default(), |some, word| match word {
            "all" => Ok(Self::ALL),
            "lanes" => Ok(Self { lanes: true, ..some }),
            "waits" => Ok(Self { waits: true, ..some }),
            "arrivals" => Ok(Self { arrivals: true, ..some }),
            other => Err(format!("{other:?}, expected all, lanes, waits or arrivals")),
        })
    }
}
