use super::*;

/// What is wrong with a program of these lines, which get addresses of their own.
fn violations(lines: &[&str]) -> Vec<String> {
    let numbered = lines.iter().scan(0, |next, line| {
        let is_label = line.ends_with(':');
        let address = *next;
        *next += if is_label { 0 } else { 16 };
        Some(if is_label { format!("{line}\n") } else { format!("/*{address:04x}*/ {line} ;\n") })
    });
    check(&Program::read(&numbered.collect::<String>()), true).violations
}

const BY_LANE: &str = "ISETP.NE.AND P0, PT, R0, 0x3, PT";
const SHUFFLE: &str = "SHFL.BFLY PT, R5, R4, 0x1, 0x1f";

#[test]
fn lanes_come_back_at_a_barrier() {
    let open = ["S2R R0, SR_TID.X", BY_LANE, "BSSY B0, `(.L_x_0)", "@P0 BRA `(.L_x_1)", "STG.E [R2.64], R4", ".L_x_1:"];
    assert_eq!(violations(&[&open[..], &["BSYNC B0", ".L_x_0:", SHUFFLE, "EXIT"]].concat()), [""; 0]);
    let before = violations(&[&open[..], &[SHUFFLE, "BSYNC B0", ".L_x_0:", "EXIT"]].concat());
    assert_eq!(before, ["0x0050: SHFL.BFLY: lanes may have parted at 0x0030"]);
    let left = ["@P0 BREAK B0", "@P0 BRA `(.L_x_2)", "BSYNC B0", ".L_x_0:", SHUFFLE, ".L_x_2:", "EXIT"];
    let after = violations(&[&open[..], &left].concat());
    assert_eq!(after, ["0x0080: SHFL.BFLY: lanes may have parted at 0x0050"]);
}

/// What ptxas made of a shuffle in a branch, with the mask of the lanes that are there: `VOTE` and `SHFL`.
#[test]
fn lanes_that_are_there_are_not_all() {
    let active = ["S2R R0, SR_TID.X", BY_LANE, "@P0 BRA `(.L_x_0)", "VOTE.ANY R5, PT, PT", SHUFFLE, ".L_x_0:", "EXIT"];
    assert_eq!(violations(&active), ["0x0040: SHFL.BFLY: lanes may have parted at 0x0020"]);
    let waits = [&active[..4], &["WARPSYNC R5", SHUFFLE, ".L_x_0:", "EXIT"]].concat();
    assert!(violations(&waits)[0].starts_with("0x0040: WARPSYNC: waits for lanes"), "{:?}", violations(&waits));
}

#[test]
fn all_lanes_are_waited_for() {
    let parted = ["S2R R0, SR_TID.X", BY_LANE, "@P0 BRA `(.L_x_0)", "STG.E [R2.64], R4", ".L_x_0:"];
    for wait in [&["WARPSYNC.ALL"][..], &["WARPSYNC 0xffffffff"], &["MOV R9, 0xffffffff", "WARPSYNC R9"]] {
        assert_eq!(violations(&[&parted[..], wait, &[SHUFFLE, "EXIT"]].concat()), [""; 0]);
    }
    let some = violations(&[&parted[..], &["WARPSYNC 0xffff", SHUFFLE, "EXIT"]].concat());
    assert_eq!(some.len(), 2, "{some:?}");
}

#[test]
fn a_branch_for_lanes_that_have_parted_has_a_wait() {
    let slow = ["EXIT", ".L_x_2:", "MOV R9, 0xffffffff", "WARPSYNC.COLLECTIVE R9, `(.L_x_3)", SHUFFLE, "ENDCOLLECTIVE"];
    let fast =
        ["S2R R0, SR_TID.X", BY_LANE, "@P0 BRA `(.L_x_0)", ".L_x_0:", "UMOV UR4, 0xffffffff", "BRA.DIV UR4, `(.L_x_2)"];
    let back = [".L_x_3:", "BRA `(.L_x_4)"];
    let program = |tail| [&fast[..], &[SHUFFLE, ".L_x_4:"], tail, &slow, &back].concat();
    assert_eq!(violations(&program(&[])), [""; 0]);
    // Those of the slow path have come back one by one.
    assert_eq!(violations(&program(&[SHUFFLE])).len(), 1);
}

#[test]
fn a_condition_of_all_lanes_parts_none() {
    let loops = |count: &'static str| {
        [
            count,
            ".L_x_0:",
            SHUFFLE,
            "IADD3 R1, R1, -0x1, RZ",
            "ISETP.NE.AND P0, PT, R1, RZ, PT",
            "@P0 BRA `(.L_x_0)",
            "EXIT",
        ]
    };
    assert_eq!(violations(&loops("LDC R1, c[0x0][0x160]")), [""; 0]);
    assert_eq!(violations(&loops("S2R R1, SR_TID.X")).len(), 1);
    assert_eq!(violations(&loops("SHFL.IDX PT, R1, R7, RZ, 0x1f")), [""; 0]);
}

#[test]
fn lanes_that_have_ended_have_no_value() {
    let by_lane = ["S2R R0, SR_TID.X", BY_LANE, "@P0 EXIT", SHUFFLE, "EXIT"];
    assert_eq!(violations(&by_lane), ["0x0030: SHFL.BFLY: lanes may have ended before"]);
    let by_cube = ["S2R R0, SR_CTAID.X", BY_LANE, "@P0 EXIT", SHUFFLE, "EXIT"];
    assert_eq!(violations(&by_cube), [""; 0]);
}

/// An atomic operation of all lanes, for which ptxas adds up what they have.
#[test]
fn lanes_are_counted_before_they_add_up() {
    let parted = ["S2R R0, SR_TID.X", BY_LANE, "@P0 BRA `(.L_x_0)", ".L_x_0:", "VOTE.ANY R5, PT, PT"];
    let program = |compare| [&parted[..], &[compare, "@!P1 BRA `(.L_x_1)", SHUFFLE, ".L_x_1:", "EXIT"]].concat();
    assert_eq!(violations(&program("ISETP.EQ.U32.AND P1, PT, R5, -0x1, PT")), [""; 0]);
    assert_eq!(violations(&program("ISETP.EQ.U32.AND P1, PT, R5, 0x1, PT")).len(), 1);
    assert_eq!(violations(&program("ISETP.NE.U32.AND P1, PT, R5, -0x1, PT")).len(), 1);
}
