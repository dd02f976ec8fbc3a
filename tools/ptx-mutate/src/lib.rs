//! Alters a kernel's PTX in one place at a time and sees whether the simulator notices.
//!
//! [`mutants`] lists the changes, [`judge`] runs one of them over [`Case`]s, [`report`] says what was noticed and what was
//! not. The README says how to read it.
mod edit;
pub mod explain;
mod mutant;
mod operators;
mod report;
mod run;
mod sample;
mod site;
mod verdicts;

pub use edit::{Edit, apply};
pub use mutant::{Alteration, MapEdit, Mutant, map_mutants, mutants};
pub use operators::MapField;
pub use report::{Judged, Report, report};
pub use run::{Case, Kill, Outcome, Reference, Run, Verdict, judge};
pub use sample::{fingerprint, sample};
pub use verdicts::Verdicts;
