//! Runs decoded kernels.
mod alu;
mod barriers;
mod copies;
mod cta;
mod float;
mod fragment;
mod matrix;
mod mem;
mod product;
mod sync;
mod warp;

pub(crate) use cta::{Limits, Setup, orders_ctas, run};
pub(crate) use float::can_convert;
pub(crate) use warp::Geometry;
