//! `tools/part.sh`, which runs a part of the tests of this program: what it does not run, it says.
#![cfg(unix)]

use std::path::Path;
use std::process::{Command, Output};

use burn::tensor::Device;

use crate::devices::skip;

fn part(part: &str, args: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/part.sh");
    let program = std::env::current_exe().expect("this test has a path");
    Command::new(script).arg(part).arg(program).args(args).output().expect("bash")
}

/// Does nothing: other tests run it.
#[test]
fn cli_part_of_one() {}

/// Does nothing, too.
#[test]
fn cli_part_of_two() {}

#[test]
fn cli_part_runs_what_the_filters_name() {
    for (which, args, run) in [
        ("0/1", &["cli_part_of_"][..], 2),
        ("1/2", &["cli_part_of_"], 1),
        ("0/1", &["cli_part_of_one", "cli_part_of_two", "--test-threads", "1"], 2),
        ("0/1", &["--exact", "cli_part::cli_part_of_one"], 1),
        ("0/1", &["cli_part_of_", "--skip", "two"], 1),
    ] {
        let output = part(which, args);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains(&format!("{run} passed")), "{args:?}: {said}");
    }
    let output = part("5/7", &["cli_part_of_"]);
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("none of its tests"));
}

/// Leaves something out.
#[test]
fn cli_part_that_skips() {
    skip(&Device::flex(), "nothing to do here");
}

/// What tests leave out is counted where it can be seen.
#[test]
fn cli_part_counts_what_is_skipped() {
    let said = |output: Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let some = said(part("0/1", &["cli_part_that_skips", "cli_part_of_one"]));
    assert!(some.contains("skipped: 1 cases of 1 tests") && some.contains("nothing to do here"), "{some}");
    let none = said(part("0/1", &["cli_part_of_one"]));
    assert!(!none.contains("skipped: "), "{none}");
}

#[test]
fn cli_part_fails_where_a_filter_names_nothing() {
    for (args, needle) in [
        (&["cli_part_of_", "cli_part_of_three"][..], "no test is named by the filter cli_part_of_three"),
        (&["--exact", "cli_part_of_one"], "cli_part_of_one"),
        (&["cli_part_of_one", "--skip", "one"], "no test is named"),
        (&["--skip", "_"], "no test is left"),
    ] {
        for which in ["0/1", "1/2"] {
            let output = part(which, args);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && stderr.contains(needle), "{args:?}: {stderr}");
        }
    }
}
