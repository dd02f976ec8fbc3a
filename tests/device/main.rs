//! placeholder
#[test]
fn t() {}
