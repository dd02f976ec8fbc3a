//! How the keys of a sequence are divided.

use serde::{Deserialize, Serialize};

use crate::MlaError;
use crate::check::Check;

/// Into how many pieces the keys of a sequence are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Splits {
    /// None, if the cubes of the machine can take whole sequences without any having more than a little above its share of the
    /// batch (a sixteenth, and at most 8 tiles of keys); otherwise as few as it takes to give every cube the same share.
    #[default]
    Auto,
    /// This many for every sequence (fewer for one that has fewer tiles), near-equal in size. 0 is
    /// refused.
    Count(usize),
    /// Pieces of this many keys, rounded up to whole tiles and counted from key 0. How a sequence is cut, and so its result,
    /// does not depend on the rest of the batch. 0 is refused.
    Tokens(usize),
}

impl Splits {
    /// A number of splits or of tokens is at least one.
    pub(crate) fn check(&self, check: &Check) -> Result<(), MlaError> {
        match self {
            Splits::Count(0) => check.value("splits", false, "Count(0)", || "Count(n) with n of at least 1".into()),
            Splits::Tokens(0) => check.value("splits", false, "Tokens(0)", || "Tokens(n) with n of at least 1".into()),
            _ => Ok(()),
        }
    }
}
