//! Rows of this program beside those of other programs, from their JSON files.

use std::path::Path;

use serde_json::Value;

/// What makes two rows the same case; absent in both is the same, too.
const KEY: [&str; 8] = ["op", "b", "s_q", "h_q", "s_k", "lens", "page", "tokens"];

/// Prints a line for each of our rows that somebody else has, too: our time, the best other time, and how many times
/// as long ours is.
pub fn print(ours: &Path, peers: &Path) -> Result<(), String> {
    let (ours, peers) = (rows(ours)?, rows(peers)?);
    println!("| case | ours us | best peer us | peer | ours / peer | ours TFLOP/s | ours GB/s |");
    println!("|---|---|---|---|---|---|---|");
    let (mut matched, mut log_sum) = (0, 0.0);
    for our in &ours {
        let same = peers.iter().filter(|peer| KEY.iter().all(|key| our.get(key) == peer.get(key)));
        let best = same.filter_map(|peer| Some((us(peer)?, peer))).min_by(|a, b| a.0.total_cmp(&b.0));
        let (Some(us), Some((best, peer))) = (us(our), best) else { continue };
        (matched, log_sum) = (matched + 1, log_sum + (us / best).ln());
        println!(
            "| {} | {us:.1} | {best:.1} | {} | {:.2} | {} | {} |",
            case(our),
            text(peer, "peer"),
            us / best,
            text(our, "tflops"),
            text(our, "gbps"),
        );
    }
    if matched == 0 {
        return Err("the two files have no case in common".into());
    }
    println!(
        "\n{matched} of {} rows; geometric mean of ours / peer: {:.3}",
        ours.len(),
        (log_sum / matched as f64).exp()
    );
    Ok(())
}

fn rows(path: &Path) -> Result<Vec<Value>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let file: Value = serde_json::from_str(&text).map_err(|error| format!("{shown} is no JSON: {error}"))?;
    file["rows"].as_array().cloned().ok_or_else(|| format!("{shown} has no `rows`"))
}

fn us(row: &Value) -> Option<f64> {
    row["us"].as_f64().filter(|us| *us > 0.0)
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
