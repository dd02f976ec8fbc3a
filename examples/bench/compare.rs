//! Rows of this program beside those of other programs, from their JSON files.

use std::fmt;
use std::path::Path;

use serde_json::Value;

use crate::common;

/// What makes two rows the same case; absent in both is the same, too.
const KEY: [&str; 17] = [
    "op",
    "format",
    "b",
    "s_q",
    "h_q",
    "h_kv",
    "d",
    "dqk",
    "dv",
    "shared",
    "s_k",
    "topk",
    "extra_topk",
    "lens",
    "causal",
    "page",
    "tokens",
];
/// Rows with a lower ratio are counted.
const SLOWER: f64 = 0.95;

/// Prints a line for each of our rows that somebody else has, too, then a line for each operation.
pub fn print(ours: &Path, peers: &Path) -> Result<(), String> {
    let (ours, peers) = (read(ours)?, read(peers)?);
    let comparison = Comparison::new(&ours, &peers)?;
    common::print(format_args!("{comparison}\n"))?;
    match comparison.pairs.len() {
        0 => Err("the two files have no case in common".into()),
        _ => Ok(()),
    }
}

/// A row of ours and the fastest of the peers' for the same case.
struct Pair<'a> {
    ours: &'a Value,
    best: &'a Value,
    /// Time of the best peer by ours: above 1 ours is faster.
    ratio: f64,
}

/// Two files row by row.
struct Comparison<'a> {
    pairs: Vec<Pair<'a>>,
    /// Ours that no peer has.
    ours_alone: Vec<&'a Value>,
    /// The peers' that we have not.
    peers_alone: Vec<&'a Value>,
    /// What the GPU could do when either program ran.
    ceilings: Vec<String>,
    /// What went wrong in either program.
    failures: Vec<String>,
}

impl<'a> Comparison<'a> {
    fn new(ours: &'a Value, peers: &'a Value) -> Result<Self, String> {
        let both = [("ours", ours), ("peers", peers)];
        let ceilings = both.iter().flat_map(|(whose, file)| ceilings(whose, file)).collect();
        let failures = both.iter().flat_map(|(whose, file)| failures(whose, file)).collect();
        let (ours, peers) = (rows("ours", ours)?, rows("peers", peers)?);
        let (mut pairs, mut ours_alone) = (Vec::new(), Vec::new());
        for our in &ours {
            let best = peers.iter().filter(|peer| same(our, peer)).min_by(|a, b| us(a).total_cmp(&us(b)));
            match best {
                Some(best) => pairs.push(Pair { ours: our, best, ratio: us(best) / us(our) }),
                None => ours_alone.push(*our),
            }
        }
        let peers_alone = peers.iter().filter(|peer| !ours.iter().any(|our| same(our, peer))).copied().collect();
        Ok(Self { pairs, ours_alone, peers_alone, ceilings, failures })
    }

    /// The operations in the order of our rows.
    fn ops(&self) -> Vec<String> {
        let mut ops: Vec<String> = self.pairs.iter().map(|pair| text(pair.ours, "op")).collect();
        let mut seen = std::collections::HashSet::new();
        ops.retain(|op| seen.insert(op.clone()));
        ops
    }

    /// Of the pairs of one operation, or of all.
    fn summary(&self, op: Option<&str>) -> Option<Summary<'_>> {
        let wanted = |pair: &&Pair| op.is_none_or(|op| text(pair.ours, "op") == op);
        let pairs: Vec<_> = self.pairs.iter().filter(wanted).collect();
        let worst = pairs.iter().copied().min_by(|a, b| a.ratio.total_cmp(&b.ratio))?;
        let mean = (pairs.iter().map(|pair| pair.ratio.ln()).sum::<f64>() / pairs.len() as f64).exp();
        let slower = pairs.iter().filter(|pair| pair.ratio < SLOWER).count();
        Some(Summary { rows: pairs.len(), mean, slower, worst })
    }
}

/// What some pairs come to.
struct Summary<'a> {
    rows: usize,
    /// Geometric mean of the ratios.
    mean: f64,
    /// How many ratios are below [`SLOWER`].
    slower: usize,
    worst: &'a Pair<'a>,
}

impl fmt::Display for Comparison<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = "| case | ours us | best peer us | peer | best peer / ours | ours TFLOP/s | ours GB/s |";
        writeln!(f, "{head} rel. rms, ours | best peer |")?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|")?;
        for Pair { ours, best, ratio } in &self.pairs {
            let (us, best_us) = (us(ours), us(best));
            let (tflops, gbps) = (text(ours, "tflops"), text(ours, "gbps"));
            let peer = text(best, "peer");
            write!(f, "| {} | {us:.1} | {best_us:.1} | {peer} | {ratio:.2} | {tflops} | {gbps} |", case(ours))?;
            writeln!(f, " {} | {} |", rel_rms(ours), rel_rms(best))?;
        }
        writeln!(f, "\nBest peer / ours: above 1 ours is faster.\n")?;
        writeln!(f, "| op | rows | geometric mean | below {SLOWER} | worst | worst case |")?;
        writeln!(f, "|---|---|---|---|---|---|")?;
        let ops = self.ops();
        for op in ops.iter().map(Some).chain([None]) {
            let Some(Summary { rows, mean, slower, worst }) = self.summary(op.map(String::as_str)) else { continue };
            let op = op.map_or("all", String::as_str);
            writeln!(f, "| {op} | {rows} | {mean:.3} | {slower} | {:.2} | {} |", worst.ratio, case(worst.ours))?;
        }
        for (whose, rows) in [("ours without a peer", &self.ours_alone), ("peers without ours", &self.peers_alone)] {
            writeln!(f, "\nRows of {whose}: {}", rows.len())?;
            rows.iter().try_for_each(|row| writeln!(f, "- {} {}", text(row, "peer"), case(row)))?;
        }
        writeln!(f)?;
        self.ceilings.iter().chain(&self.failures).try_for_each(|line| writeln!(f, "{line}"))
    }
}

fn read(path: &Path) -> Result<Value, String> {
    let shown = path.display();
    let text = common::read_text(path)?;
    serde_json::from_str(&text).map_err(|error| format!("{shown} is no JSON: {error}"))
}

/// The rows that have a time.
fn rows<'a>(whose: &str, file: &'a Value) -> Result<Vec<&'a Value>, String> {
    let rows = file["rows"].as_array().ok_or_else(|| format!("no `rows` in the file of {whose}"))?;
    Ok(rows.iter().filter(|row| us(row) > 0.0).collect())
}

/// By these one sees whether the GPU was in the same state.
fn ceilings(whose: &str, file: &Value) -> Vec<String> {
    let line = |when: &str| {
        let found = file["ceilings"].get(when)?;
        let (copy, empty) = (&found["copy_GBps"], &found["empty_kernel_us"]["us"]);
        Some(format!("{whose}, {when}: a copy has {copy} GB/s, an empty kernel reads {empty} us"))
    };
    ["start", "end"].into_iter().filter_map(line).collect()
}

/// Cases that failed or were left out, and wrong results.
fn failures(whose: &str, file: &Value) -> Vec<String> {
    let list = |key: &str| file[key].as_array().cloned().unwrap_or_default();
    let wrong = list("checks").into_iter().filter(|check| check["ok"] == false);
    let mut lines: Vec<String> =
        wrong.map(|check| format!("{whose}: wrong result: {}", text(&check, "name"))).collect();
    lines.extend(list("errors").iter().map(|error| format!("{whose}: failed: {}", text(error, "where"))));
    lines.extend(list("skipped").iter().map(|case| format!("{whose}: no time left: {}", case.as_str().unwrap_or("?"))));
    lines
}

fn same(a: &Value, b: &Value) -> bool {
    KEY.iter().all(|key| a.get(key) == b.get(key))
}

fn us(row: &Value) -> f64 {
    row["us"].as_f64().unwrap_or(0.0)
}

/// How far its results are from f64, where that is known.
fn rel_rms(row: &Value) -> String {
    row["rel_rms"].as_f64().map_or("".into(), |value| format!("{value:.1e}"))
}

fn text(row: &Value, key: &str) -> String {
    row.get(key).map_or("".into(), |value| value.as_str().map_or_else(|| value.to_string(), str::to_string))
}

fn case(row: &Value) -> String {
    let present = KEY.iter().filter(|key| row.get(key).is_some());
    present
        .map(|key| if *key == "op" { text(row, key) } else { format!("{key} {}", text(row, key)) })
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_are_matched_with_the_best_peer() {
        let ours = json!({
            "rows": [
                { "peer": "burn-mla", "op": "dense", "b": 1, "lens": "fixed", "us": 10.0 },
                { "peer": "burn-mla", "op": "dense", "b": 2, "lens": "fixed", "us": 10.0 },
                { "peer": "burn-mla", "op": "dense", "b": 2, "lens": "var", "us": 10.0 },
                { "peer": "burn-mla", "op": "merge", "tokens": 3, "us": 4.0 },
                { "peer": "burn-mla", "op": "ragged", "b": 1, "dqk": 192, "shared": 64, "us": 4.0, "rel_rms": 0.00123 },
            ],
            "ceilings": { "start": { "copy_GBps": 4000.0, "empty_kernel_us": { "us": 3.5 } } },
            "skipped": ["dense, the rest"],
        });
        let peers = json!({
            "rows": [
                { "peer": "x", "op": "dense", "b": 1, "lens": "fixed", "us": 25.0 },
                { "peer": "y", "op": "dense", "b": 1, "lens": "fixed", "us": 20.0 },
                { "peer": "x", "op": "dense", "b": 2, "lens": "fixed", "us": 5.0 },
                { "peer": "x", "op": "dense", "b": 4, "lens": "fixed", "us": 5.0 },
                { "peer": "x", "op": "dense", "b": 2, "lens": "var" },
                { "peer": "z", "op": "merge", "tokens": 3, "us": 32.0 },
                { "peer": "z", "op": "ragged", "b": 1, "dqk": 192, "shared": 64, "us": 8.0, "rel_rms": 0.002 },
                { "peer": "z", "op": "ragged", "b": 1, "dqk": 192, "shared": 0, "us": 2.0 },
                { "peer": "z", "op": "ragged", "b": 1, "dqk": 128, "shared": 64, "us": 2.0 },
            ],
            "checks": [{ "name": "a", "ok": true }, { "name": "b", "ok": false }],
        });
        let comparison = Comparison::new(&ours, &peers).expect("two files");
        let ratios: Vec<f64> = comparison.pairs.iter().map(|pair| pair.ratio).collect();
        assert_eq!(ratios, [2.0, 0.5, 8.0, 2.0]);
        assert_eq!(text(comparison.pairs[0].best, "peer"), "y");
        assert_eq!((comparison.ours_alone.len(), comparison.peers_alone.len()), (1, 3));
        assert_eq!(comparison.failures, ["ours: no time left: dense, the rest", "peers: wrong result: b"]);

        assert_eq!(comparison.ops(), ["dense", "merge", "ragged"]);
        let dense = comparison.summary(Some("dense")).expect("two rows");
        assert!((dense.mean - 1.0).abs() < 1e-12, "{}", dense.mean);
        assert_eq!((dense.rows, dense.slower, dense.worst.ratio), (2, 1, 0.5));
        let all = comparison.summary(None).expect("four rows");
        assert!((all.mean - 2.0).abs() < 1e-12, "{}", all.mean);

        assert_eq!(comparison.ceilings, ["ours, start: a copy has 4000.0 GB/s, an empty kernel reads 3.5 us"]);
        let printed = comparison.to_string();
        assert!(printed.contains("| 2.00 |  |  | 1.2e-3 | 2.0e-3 |"), "{printed}");
        assert!(printed.contains("| all | 4 | 2.000 | 1 | 0.50 | dense b 2 lens fixed |"), "{printed}");
        assert!(printed.contains("Rows of peers without ours: 3\n- x dense b 4 lens fixed"), "{printed}");
    }
}
