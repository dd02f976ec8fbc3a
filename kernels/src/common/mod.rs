//! Small helpers of launchers and kernels of several operations.

pub(crate) mod device;
pub(crate) mod keys;
pub(crate) mod last_cube;
pub(crate) mod launch;
pub(crate) mod plane;
pub(crate) mod scan;
pub(crate) mod select;
