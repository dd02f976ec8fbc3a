//! Device time of a call: medians, L2 flushed before every call, plain and as a replayed graph.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use burn::backend::{Backend, BackendGraph, Dispatch, ProfileDuration, TimingMethod};
use burn::tensor::{DType, Device, Tensor};

/// f32 numbers that the flush writes: 256 MiB, five times the L2 of an H200.
const FLUSH_LEN: usize = 64 << 20;
/// The flush where only the program is tried.
const FLUSH_LEN_SMOKE: usize = 1 << 12;
/// Calls before any is timed.
const WARM_UP: usize = 3;
/// Slow calls are timed for about this long, and at least [`LEAST`] times.
const BUDGET: Duration = Duration::from_secs(2);
const LEAST: usize = 5;
/// CubeCL reports an hour for a window that it could not read.
const UNREADABLE_US: f64 = 3.5e9;

/// The times of one case; see the module docs of the program.
#[derive(Debug, Clone)]
pub struct Times {
    pub us: f64,
    pub us_min: f64,
    pub us_p90: f64,
    pub us_stream: f64,
    pub us_host: f64,
    pub us_stream_host: f64,
    pub n: usize,
    pub timing: &'static str,
    /// `graph`, `stream` or `host`.
    pub how: &'static str,
    /// Why there is no graph, where one was tried.
    pub graph_error: Option<String>,
}

/// Some runs of a call.
pub struct Series {
    /// Sorted.
    us: Vec<f64>,
    /// Median time that the host took to queue it with both events.
    us_host: f64,
    timing: &'static str,
}

impl Series {
    pub fn median(&self) -> f64 {
        median(&self.us)
    }
}

/// Times calls on one device.
pub struct Timer {
    device: Device,
    /// What the flush writes; `None` only while it is written.
    flush: Option<Tensor<1>>,
    iters: usize,
}

impl Timer {
    pub fn new(device: &Device, iters: usize, smoke: bool) -> Self {
        let len = if smoke { FLUSH_LEN_SMOKE } else { FLUSH_LEN };
        let flush = Tensor::zeros([len], (device, DType::F32));
        Self { device: device.clone(), flush: Some(flush), iters }
    }

    /// Plain calls, then replays of a graph of one call.
    pub fn measure<T>(&mut self, mut call: impl FnMut() -> Result<T, String> + Send) -> Result<Times, String> {
        let n = self.warm_up(&mut call)?;
        let stream = self.series(n, &mut || call().map(drop))?;
        let (series, graph_error) = match self.replays(n, &mut call) {
            Ok(series) => (Some(series), None),
            Err(reason) => (None, Some(reason)),
        };
        let shown = series.as_ref().unwrap_or(&stream);
        Ok(Times {
            us: shown.median(),
            us_min: shown.us[0],
            us_p90: shown.us[p90(shown.us.len())],
            us_stream: stream.median(),
            us_host: shown.us_host,
            us_stream_host: stream.us_host,
            n: shown.us.len(),
            timing: shown.timing,
            how: if graph_error.is_none() { "graph" } else { "stream" },
            graph_error,
        })
    }

    /// The host's time from a call on an idle device until its results are there.
    pub fn measure_host<T>(&mut self, mut call: impl FnMut() -> Result<T, String>) -> Result<Times, String> {
        let n = self.warm_up(&mut call)?;
        let mut us = Vec::with_capacity(n);
        for _ in 0..n {
            let start = Instant::now();
            let _output = call()?;
            self.sync()?;
            us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        us.sort_by(f64::total_cmp);
        let all = median(&us);
        Ok(Times {
            us: all,
            us_min: us[0],
            us_p90: us[p90(n)],
            us_stream: all,
            us_host: all,
            us_stream_host: all,
            n,
            timing: "system",
            how: "host",
            graph_error: None,
        })
    }

    /// Plain calls only.
    pub fn measure_stream<T>(&mut self, mut call: impl FnMut() -> Result<T, String> + Send) -> Result<f64, String> {
        let n = self.warm_up(&mut call)?;
        Ok(self.series(n, &mut || call().map(drop))?.median())
    }

    /// What the flush itself takes.
    pub fn measure_flush(&mut self) -> Result<f64, String> {
        let mut us = Vec::new();
        for _ in 0..self.iters {
            let device = self.device.clone();
            // One more in front, so that the device is busy while the host queues the other.
            self.flush();
            let ((), duration) = device.profile(|| self.flush()).map_err(|error| error.to_string())?;
            us.push(resolve(duration)?.0);
        }
        us.sort_by(f64::total_cmp);
        Ok(median(&us))
    }

    /// The host's time of one call, compiled and on an idle device, in microseconds.
    pub fn measure_once<T>(&self, mut call: impl FnMut() -> Result<T, String>) -> Result<f64, String> {
        call()?;
        self.sync()?;
        let start = Instant::now();
        let _output = call()?;
        self.sync()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// Compiles, tunes and warms up; says how often to time the call.
    fn warm_up<T>(&mut self, call: &mut impl FnMut() -> Result<T, String>) -> Result<usize, String> {
        call()?;
        self.sync()?;
        let start = Instant::now();
        call()?;
        self.sync()?;
        let one = start.elapsed();
        for _ in 2..WARM_UP {
            call()?;
        }
        self.sync()?;
        let affordable = (BUDGET.as_secs_f64() / one.as_secs_f64().max(1e-9)) as usize;
        Ok(affordable.max(LEAST).min(self.iters))
    }

    /// Replays of a graph of one call.
    fn replays<T>(
        &mut self,
        n: usize,
        call: &mut (impl FnMut() -> Result<T, String> + Send),
    ) -> Result<Series, String> {
        let device = self.device.clone();
        let graph = Captured::record(&device, call)?;
        let mut replay = || {
            // SAFETY: what the call reads and writes is owned or borrowed by `call`, or held in `graph`; all of it
            // outlives this function, which waits for the replays. One thread uses the device, on one queue.
            unsafe { Dispatch::graph_replay(device.as_dispatch(), &graph.graph) }.map_err(|error| error.to_string())
        };
        for _ in 0..WARM_UP {
            replay()?;
        }
        self.sync()?;
        let series = self.series(n, &mut replay);
        self.sync()?;
        series
    }

    /// Times a call `n` times. The times are read at the end, so that the host runs ahead of the device.
    fn series(&mut self, n: usize, call: &mut (dyn FnMut() -> Result<(), String> + Send)) -> Result<Series, String> {
        let device = self.device.clone();
        let (mut pending, mut us_host) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for _ in 0..n {
            self.flush();
            let start = Instant::now();
            let (result, duration) = device.profile(&mut *call).map_err(|error| error.to_string())?;
            // Closing the window waits until the call is queued, not only until the thread that queues has been told.
            us_host.push(start.elapsed().as_secs_f64() * 1e6);
            result?;
            pending.push(duration);
        }
        self.sync()?;
        let times = pending.into_iter().map(resolve).collect::<Result<Vec<_>, _>>()?;
        let timing = times.first().map_or("system", |(_, timing)| timing);
        let mut us: Vec<f64> = times.into_iter().map(|(us, _)| us).collect();
        us.sort_by(f64::total_cmp);
        us_host.sort_by(f64::total_cmp);
        Ok(Series { us_host: median(&us_host), us, timing })
    }

    /// Fills L2 with lines that no call reads.
    fn flush(&mut self) {
        // In place, as this is the tensor's only handle.
        self.flush = self.flush.take().map(|tensor| tensor.add_scalar(1.0));
    }

    fn sync(&self) -> Result<(), String> {
        self.device.sync().map_err(|error| error.to_string())
    }
}

/// A graph of one call, and what the call returned: its buffers are written by every replay.
struct Captured<T> {
    graph: BackendGraph<Dispatch>,
    _output: T,
}

impl<T> Captured<T> {
    /// Records a call. Burn's own `capture` does the same and keeps the reason of a failure to itself.
    fn record(device: &Device, call: &mut impl FnMut() -> Result<T, String>) -> Result<Self, String> {
        let device = device.as_dispatch();
        Dispatch::graph_prepare(device).map_err(|error| error.to_string())?;
        let recorded = caught(|| {
            // Nothing may be allocated while the graph is recorded: these calls leave in the pool what it needs.
            for _ in 0..WARM_UP {
                let output = call()?;
                Dispatch::sync(device).map_err(|error| error.to_string())?;
                drop(output);
            }
            Dispatch::graph_start_capture(device).map_err(|error| error.to_string())?;
            call()
        });
        // In any case: it also takes the queue out of the preparation.
        let graph = Dispatch::graph_stop_capture(device).map_err(|error| error.to_string());
        recorded.and_then(|output| Ok(Self { graph: graph?, _output: output }))
    }
}

/// Microseconds of a window, and what clock they are from.
fn resolve(duration: ProfileDuration) -> Result<(f64, &'static str), String> {
    let timing = match duration.timing_method() {
        TimingMethod::Device => "device",
        TimingMethod::System => "system",
    };
    let ticks = block_on(duration.resolve()).ok_or("the device measured nothing")?;
    let us = ticks.duration().as_secs_f64() * 1e6;
    if us > UNREADABLE_US {
        return Err("the device's clock could not be read".into());
    }
    Ok((us, timing))
}

/// Waits for a future that a device makes ready.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Where the 90th percentile of so many sorted numbers is.
fn p90(n: usize) -> usize {
    n.saturating_sub(1) * 9 / 10
}

/// Of sorted numbers.
fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => f64::NAN,
        n => (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
    }
}

/// A panic as an error: Burn's operations have no other way to refuse.
pub fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panicked: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")))
    })
}
