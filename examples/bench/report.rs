//! The rows: printed as they come, and written as JSON.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::common::print;
use crate::timing::Times;

/// How old the file may get.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Numbers of a row in the order in which they are printed.
pub type Fields<'a> = [(&'a str, Value)];

/// What a call computes and moves, where that is counted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Volume {
    pub flops: Option<f64>,
    pub bytes: Option<f64>,
}

/// Everything measured so far.
pub struct Report {
    out: Option<PathBuf>,
    meta: Map<String, Value>,
    ceilings: Map<String, Value>,
    rows: Vec<Value>,
    errors: Vec<Value>,
    skipped: Vec<String>,
    started: Instant,
    saved: Instant,
    /// Why stdout has not all of it.
    unprinted: Option<String>,
}

impl Report {
    /// A report that is kept in a file, if one is named.
    pub fn create(out: Option<PathBuf>, meta: Map<String, Value>) -> Result<Self, String> {
        let now = Instant::now();
        let (rows, errors, skipped) = (Vec::new(), Vec::new(), Vec::new());
        let line = |(key, value): (&String, &Value)| {
            format!("{key}: {}\n", value.as_str().map_or_else(|| value.to_string(), str::to_string))
        };
        // What cannot be written should not show after minutes of work.
        print(meta.iter().map(line).collect::<String>())?;
        let unprinted = None;
        let report =
            Self { out, meta, ceilings: Map::new(), rows, errors, skipped, started: now, saved: now, unprinted };
        report.save()?;
        Ok(report)
    }

    /// Adds a row: `shape` names the case, `extra` is what else is known of it. Returns its GB/s.
    pub fn row(&mut self, op: &str, shape: &Fields, times: &Times, volume: Volume, extra: &Fields) -> Option<f64> {
        let tflops = volume.flops.map(|flops| flops / times.us / 1e6);
        let gbps = volume.bytes.map(|bytes| bytes / times.us / 1e3);
        let mut row = Map::new();
        row.insert("peer".into(), json!("burn-mla"));
        row.insert("op".into(), json!(op));
        row.extend(shape.iter().chain(extra).map(|(key, value)| (key.to_string(), value.clone())));
        for (key, us) in [
            ("us", times.us),
            ("us_min", times.us_min),
            ("us_p90", times.us_p90),
            ("us_stream", times.us_stream),
            ("us_host", times.us_host),
            ("us_stream_host", times.us_stream_host),
        ] {
            row.insert(key.into(), rounded(us, 3));
        }
        row.insert("n".into(), json!(times.n));
        row.insert("how".into(), json!(times.how));
        row.insert("timing".into(), json!(times.timing));
        row.extend(times.graph_error.iter().map(|reason| ("graph_error".to_string(), json!(first_line(reason)))));
        row.extend(tflops.map(|value| ("tflops".to_string(), rounded(value, 1))));
        row.extend(gbps.map(|value| ("gbps".to_string(), rounded(value, 1))));
        self.rows.push(Value::Object(row));
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        self.say(&format!(
            "{op:14} {:60} {:>10.1} us  stream {:>10.1}  host {:>7.1} {:>7.1} {:>7} TF/s {:>7} GB/s  {}, {}{}",
            words(shape),
            times.us,
            times.us_stream,
            times.us_host,
            times.us_stream_host,
            number(tflops),
            number(gbps),
            times.how,
            times.timing,
            if extra.is_empty() { String::new() } else { format!("  {}", words(extra)) },
        ));
        gbps
    }

    /// Adds a row without times of calls.
    pub fn rate(&mut self, op: &str, shape: &Fields, numbers: &Fields) {
        let mut row = Map::new();
        row.insert("peer".into(), json!("burn-mla"));
        row.insert("op".into(), json!(op));
        row.extend(shape.iter().chain(numbers).map(|(key, value)| (key.to_string(), value.clone())));
        self.rows.push(Value::Object(row));
        self.say(&format!("{op:14} {:60} {}", words(shape), words(numbers)));
    }

    /// Adds the ceilings of the start or the end.
    pub fn ceilings(&mut self, key: &str, values: Map<String, Value>) {
        self.say(&format!("ceilings, {key}: {}", Value::Object(values.clone())));
        self.ceilings.insert(key.into(), Value::Object(values));
    }

    /// Notes a case that failed.
    pub fn error(&mut self, case: &str, error: &str) {
        self.say(&format!("FAILED {case}: {}", first_line(error)));
        self.errors.push(json!({ "where": case, "error": error }));
    }

    /// Notes a case for which no time was left.
    pub fn skip(&mut self, case: &str) {
        self.skipped.push(case.into());
    }

    /// Prints a line with the time, and writes the file now and then.
    pub fn say(&mut self, line: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.unprinted = self.unprinted.take().or_else(|| print(format_args!("[{seconds:7.1}] {line}\n")).err());
        if self.saved.elapsed() > SAVE_EVERY {
            self.saved = Instant::now();
            // The last time counts: `finish` reports what is wrong with the file.
            let _ = self.save();
        }
    }

    /// Writes the file; the exit code says whether all cases ran.
    pub fn finish(mut self) -> Result<ExitCode, String> {
        self.meta.extend(crate::meta::gpu_state("gpu_end"));
        self.meta.insert("seconds".into(), rounded(self.started.elapsed().as_secs_f64(), 1));
        self.save()?;
        let (rows, errors, skipped) = (self.rows.len(), self.errors.len(), self.skipped.len());
        let summary = format!("{rows} rows, {errors} errors, {skipped} cases skipped for lack of time\n");
        self.unprinted.take().map_or_else(|| print(summary), Err)?;
        Ok(if self.errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn save(&self) -> Result<(), String> {
        let Some(path) = &self.out else { return Ok(()) };
        let all = json!({
            "meta": self.meta,
            "ceilings": self.ceilings,
            "rows": self.rows,
            "errors": self.errors,
            "skipped": self.skipped,
        });
        let failed = |error: &dyn Display| format!("cannot write {}: {error}", path.display());
        // A pipe would wait for somebody who reads it, again and again.
        if std::fs::metadata(path).is_ok_and(|there| !there.is_file() && !is_device(&there)) {
            return Err(failed(&"it is no regular file"));
        }
        std::fs::write(path, format!("{all:#}\n")).map_err(|error| failed(&error))
    }
}

/// Whether something is a device, as `/dev/null` is.
fn is_device(metadata: &std::fs::Metadata) -> bool {
    #[cfg(unix)]
    return std::os::unix::fs::FileTypeExt::is_char_device(&metadata.file_type());
    #[cfg(not(unix))]
    {
        let _ = metadata;
        false
    }
}

/// A number with so many digits after the point; null if it is none.
pub fn rounded(value: f64, digits: i32) -> Value {
    let scale = 10f64.powi(digits);
    json!((value * scale).round() / scale)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn words(fields: &Fields) -> String {
    let word = |(key, value): &(&str, Value)| {
        format!("{key}={}", value.as_str().map_or_else(|| value.to_string(), str::to_string))
    };
    fields.iter().map(word).collect::<Vec<_>>().join(" ")
}
