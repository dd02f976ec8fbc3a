//! A functional simulator of the PTX that our GPU kernels are compiled to.
//!
//! [`parse`] reads what NVRTC wrote, [`Launch`] runs a kernel of it on [`Memory`]. The README says what is checked on
//! the way and what is missing.
mod adversary;
mod coverage;
mod decode;
mod error;
mod exec;
mod ir;
mod launch;
mod memory;
mod parse;
mod stats;
mod tensor;
pub mod timing;
mod trace;

pub use adversary::Adversary;
pub use coverage::Coverage;
pub use decode::unknown_instructions;
pub use error::{CudaLine, Fault, ParseError, Place, SimError};
pub use launch::{Launch, Param};
pub use memory::{Buffer, Memory, Shared};
pub use parse::{Entry, Guard, Instr, Loc, Module, Operand, Parameter, RegType, Scope, Variable, parse};
pub use stats::Stats;
pub use tensor::{TENSOR_MAP_BYTES, TensorElem, TensorMap, TensorMapError, TensorSwizzle};
pub use trace::{Outcome, Range, Recorded, ReplayError, Trace, TraceError};
