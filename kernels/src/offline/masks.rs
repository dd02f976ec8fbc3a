//! Whether each exchange of a warp's lanes names all of them.
//!
//! PTX: a lane waits at `shfl.sync` and its like until all that the mask names have come. ptxas brings no more of them together than
//! those; of a mask that is what happens to be there (`activemask`, which CubeCL's `plane_*` take) it makes no wait at all, so that
//! machine code does not show it.

/// Exchanges and waits of a warp, of which the last operand is the mask.
const SYNCHRONOUS: [&str; 7] =
    ["shfl.sync", "vote.sync", "match.any.sync", "match.all.sync", "redux.sync", "bar.warp.sync", "elect.sync"];
/// All lanes.
const ALL: [&str; 2] = ["0xffffffff", "-1"];

/// The statements of PTX that do not name all lanes, or ask which are there.
pub(super) fn partial(ptx: &str) -> Vec<String> {
    let code = ptx.lines().map(|line| line.split("//").next().unwrap_or_default());
    let statements = code.flat_map(|line| line.split([';', '{', '}'])).map(str::trim);
    let is_partial = |statement: &&str| {
        let mut words = statement.split_whitespace().skip_while(|word| word.starts_with('@'));
        let opcode = words.next().unwrap_or_default();
        let mask = statement.rsplit([',', ' ', '\t']).next().unwrap_or_default();
        let is_exchange = SYNCHRONOUS.iter().any(|name| opcode.starts_with(name));
        opcode.starts_with("activemask") || (is_exchange && !ALL.contains(&mask))
    };
    statements.filter(is_partial).map(|statement| format!("{statement}: not of all lanes")).collect()
}

#[cfg(test)]
mod tests {
    use super::partial;

    #[test]
    fn all_lanes_are_named() {
        let ptx = "\
\tshfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffffffff;
\tbar.warp.sync \t-1;
@%p1 bra $L__BB0_1; // shfl.sync.idx.b32 a, b, 0, 31, c;
{ .reg .pred p; vote.sync.ballot.b32 %r3, p, 0xffffffff; }
\t@%p2 elect.sync _|p, 0xffffffff;
";
        assert_eq!(partial(ptx), [""; 0]);
    }

    #[test]
    fn lanes_that_happen_to_be_there_are_not_all() {
        let ptx = "\
\tactivemask.b32 %r33;
\tshfl.sync.bfly.b32 \t%r37|%p7, %r34, %r36, %r35, %r33;
{ vote.sync.any.pred p, p, 0x0000ffff; }
\tbar.warp.sync %r1;
";
        let partial = partial(ptx);
        let starts = ["activemask.b32", "shfl.sync.bfly.b32", "vote.sync.any.pred", "bar.warp.sync"];
        assert!(
            partial.len() == 4 && partial.iter().zip(starts).all(|(one, start)| one.starts_with(start)),
            "{partial:?}"
        );
    }
}
