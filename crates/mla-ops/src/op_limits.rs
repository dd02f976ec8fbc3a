//! The launchers' own checks, asked with the sizes of a call before anything is launched.

use crate::check::Check;
use crate::{ExpertsMlpArgs, MlaError};

/// The device computes these experts.
pub(crate) fn experts(check: &Check, args: &ExpertsMlpArgs) -> Result<(), MlaError> {
    if check.client().is_none() {
        return Ok(());
    }
    check.elements("x", &args.x)?;
    check.elements("gate_up", &args.gate_up)?;
    check.elements("down", &args.down)?;
    if let Some(shared) = &args.shared {
        check.elements("shared.gate_up", &shared.gate_up)?;
        check.elements("shared.down", &shared.down)?;
    }
    let ([tokens, hidden], [_, _, width]) = (args.x.dims(), args.down.dims());
    let (pairs, argument) = (tokens * args.routing.top_k(), args.routing.argument());
    if i32::try_from(pairs).is_err() {
        let reason = format!("{pairs} pairs of token and expert, and the most is {}", i32::MAX);
        return Err(check.device_limit(argument, reason));
    }
    check.allocation(argument, args.x.dtype(), [pairs, hidden.max(width)])
}
