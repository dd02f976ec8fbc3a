//! Streams that capture: what they are given becomes nodes of a graph (CUDA programming guide, "Creating a Graph Using
//! Stream Capture"). What is not permitted meanwhile invalidates the capture, which the end of it then reports.
use crate::code::Code;
use crate::graph::Node;
use std::collections::{BTreeSet, HashMap};
use std::thread::ThreadId;
use std::time::Instant;

/// How far a capture restricts what else may be called (`CUstreamCaptureMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No thread may make potentially unsafe calls.
    Global,
    /// The capturing thread may not.
    ThreadLocal,
    /// All may.
    Relaxed,
}

impl Mode {
    /// The mode of a number of `CUstreamCaptureMode`.
    ///
    /// # Errors
    /// [`Code::InvalidValue`].
    pub fn from_cuda(mode: u32) -> Result<Self, Code> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed].get(mode as usize).copied().ok_or(Code::InvalidValue)
    }
}

/// What a stream does with what it is given (`CUstreamCaptureStatus`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It runs it.
    None = 0,
    /// It captures it.
    Active = 1,
    /// It refuses it until the capture ends.
    Invalidated = 2,
}

/// What an event was last recorded in.
#[derive(Debug, Clone)]
pub enum Event {
    /// In nothing yet.
    New,
    /// In a stream that ran what it was given, at this time.
    Recorded(Instant),
    /// In a stream that captured.
    Captured(Position),
}

/// A point in a stream that captures: the nodes that come before.
#[derive(Debug, Clone)]
pub struct Position {
    capture: u64,
    before: BTreeSet<usize>,
}

struct Capture {
    origin: usize,
    mode: Mode,
    thread: ThreadId,
    invalid: bool,
    nodes: Vec<Node>,
}

/// The captures under way, and the streams that take part.
#[derive(Default)]
pub struct Captures {
    captures: HashMap<u64, Capture>,
    streams: HashMap<usize, Position>,
    count: u64,
}

impl Captures {
    /// Begins a capture.
    ///
    /// # Errors
    /// [`Code::CaptureUnsupported`] of the default streams, [`Code::IllegalState`] of one that captures already.
    pub fn begin(&mut self, stream: usize, mode: Mode) -> Result<(), Code> {
        // `CU_STREAM_LEGACY` is 1; of the handle 0 it is not known whether it means that one or the thread's own.
        if stream <= 1 {
            return Err(Code::CaptureUnsupported);
        }
        if self.streams.contains_key(&stream) {
            return Err(Code::IllegalState);
        }
        self.count += 1;
        let thread = std::thread::current().id();
        self.captures.insert(self.count, Capture { origin: stream, mode, thread, invalid: false, nodes: Vec::new() });
        self.streams.insert(stream, Position { capture: self.count, before: BTreeSet::new() });
        Ok(())
    }

    /// Ends a capture: its nodes in the order in which they were given, and why no graph can be made of them.
    ///
    /// # Errors
    /// Nothing ends: [`Code::IllegalState`] of a stream that does not capture, [`Code::CaptureUnmatched`],
    /// [`Code::CaptureWrongThread`].
    pub fn end(&mut self, stream: usize) -> Result<(Vec<Node>, Result<(), Code>), Code> {
        let position = self.streams.get(&stream).ok_or(Code::IllegalState)?;
        let capture = self.captures.get(&position.capture).ok_or(Code::IllegalState)?;
        if capture.origin != stream {
            return Err(Code::CaptureUnmatched);
        }
        if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(Code::CaptureWrongThread);
        }
        let outcome = if capture.invalid {
            Err(Code::CaptureInvalidated)
        } else if position.before.len() < capture.nodes.len() {
            Err(Code::CaptureUnjoined)
        } else {
            Ok(())
        };
        Ok((self.stop(position.capture), outcome))
    }

    /// Takes all streams out of a capture.
    fn stop(&mut self, capture: u64) -> Vec<Node> {
        self.streams.retain(|_, position| position.capture != capture);
        self.captures.remove(&capture).map(|capture| capture.nodes).unwrap_or_default()
    }

    /// A stream is destroyed, and with it the capture that began in it.
    pub fn destroyed(&mut self, stream: usize) {
        let Some(position) = self.streams.remove(&stream) else { return };
        self.invalidate(position.capture, Code::InvalidHandle);
        if self.captures.get(&position.capture).is_some_and(|capture| capture.origin == stream) {
            self.stop(position.capture);
        }
    }

    /// What a stream does with what it is given.
    pub fn status(&self, stream: usize) -> Status {
        let capture = self.streams.get(&stream).and_then(|position| self.captures.get(&position.capture));
        match capture {
            None => Status::None,
            Some(capture) if capture.invalid => Status::Invalidated,
            Some(_) => Status::Active,
        }
    }

    /// Whether a stream captures what it is given.
    ///
    /// # Errors
    /// [`Code::CaptureInvalidated`] if it takes nothing.
    pub fn captures(&self, stream: usize) -> Result<bool, Code> {
        match self.status(stream) {
            Status::None => Ok(false),
            Status::Active => Ok(true),
            Status::Invalidated => Err(Code::CaptureInvalidated),
        }
    }

    /// Adds a node behind what the stream has captured.
    pub fn push(&mut self, stream: usize, node: Node) {
        if let Some(position) = self.streams.get_mut(&stream)
            && let Some(capture) = self.captures.get_mut(&position.capture)
        {
            position.before.insert(capture.nodes.len());
            capture.nodes.push(node);
        }
    }

    /// The nodes that a stream's capture has so far.
    pub fn nodes(&self, stream: usize) -> &[Node] {
        let capture = self.streams.get(&stream).and_then(|position| self.captures.get(&position.capture));
        capture.map_or(&[], |capture| &capture.nodes)
    }

    /// What an event is that is recorded in a stream.
    ///
    /// # Errors
    /// [`Code::CaptureInvalidated`].
    pub fn record(&self, stream: usize) -> Result<Event, Code> {
        Ok(match (self.captures(stream)?, self.streams.get(&stream)) {
            (true, Some(position)) => Event::Captured(position.clone()),
            _ => Event::Recorded(Instant::now()),
        })
    }

    /// Makes a stream wait for an event: within a capture, or into one.
    ///
    /// # Errors
    /// [`Code::CaptureIsolation`] if it would leave the capture, [`Code::CaptureMerge`] if it would join two.
    pub fn wait(&mut self, stream: usize, event: &Event) -> Result<(), Code> {
        let capturing = self.captures(stream)?;
        let Event::Captured(awaited) = event else {
            return if capturing { Err(self.refuse(stream, Code::CaptureIsolation)) } else { Ok(()) };
        };
        match self.captures.get(&awaited.capture) {
            None => return Err(self.refuse(stream, Code::CapturedEvent)),
            Some(capture) if capture.invalid => return Err(Code::CaptureInvalidated),
            Some(_) => {}
        }
        let position =
            self.streams.entry(stream).or_insert(Position { capture: awaited.capture, before: BTreeSet::new() });
        if position.capture != awaited.capture {
            self.invalidate(awaited.capture, Code::CaptureMerge);
            return Err(self.refuse(stream, Code::CaptureMerge));
        }
        position.before.extend(&awaited.before);
        Ok(())
    }

    /// The host asks for, or waits for, the end of work that a stream has; captured work has none.
    ///
    /// # Errors
    /// [`Code::CaptureUnsupported`].
    pub fn wait_on_host(&mut self, stream: usize) -> Result<(), Code> {
        if self.captures(stream)? { Err(self.refuse(stream, Code::CaptureUnsupported)) } else { Ok(()) }
    }

    /// The host asks for, or waits for, an event.
    ///
    /// # Errors
    /// [`Code::CapturedEvent`].
    pub fn event_on_host(&mut self, event: &Event) -> Result<(), Code> {
        let Event::Captured(position) = event else { return Ok(()) };
        self.invalidate(position.capture, Code::CapturedEvent);
        Err(Code::CapturedEvent)
    }

    /// The host waits for the whole context.
    ///
    /// # Errors
    /// [`Code::CaptureUnsupported`].
    pub fn context_on_host(&mut self) -> Result<(), Code> {
        self.prohibited("cuCtxSynchronize", |_| true)
    }

    /// A call that is potentially unsafe (`cuThreadExchangeStreamCaptureMode`): what it does is in no stream, so that a
    /// graph would lack it.
    ///
    /// # Errors
    /// [`Code::CaptureUnsupported`].
    pub fn unsafe_call(&mut self, function: &str) -> Result<(), Code> {
        let thread = std::thread::current().id();
        self.prohibited(function, |capture| match capture.mode {
            Mode::Global => true,
            Mode::ThreadLocal => capture.thread == thread,
            Mode::Relaxed => false,
        })
    }

    fn prohibited(&mut self, function: &str, by: impl Fn(&Capture) -> bool) -> Result<(), Code> {
        let mut found = false;
        for capture in self.captures.values_mut().filter(|capture| by(capture)) {
            capture.invalid = true;
            found = true;
        }
        if !found {
            return Ok(());
        }
        eprintln!("sim-cuda: a capture is invalidated: {function} is not permitted while a stream captures");
        Err(Code::CaptureUnsupported)
    }

    /// Invalidates the capture of a stream because of an error.
    pub fn refuse(&mut self, stream: usize, code: Code) -> Code {
        if let Some(capture) = self.streams.get(&stream).map(|position| position.capture) {
            self.invalidate(capture, code);
        }
        code
    }

    fn invalidate(&mut self, capture: u64, code: Code) {
        let Some(capture) = self.captures.get_mut(&capture).filter(|capture| !capture.invalid) else { return };
        capture.invalid = true;
        let description = Code::texts(code as u32).map(|(_, description)| description.to_string_lossy());
        eprintln!("sim-cuda: a capture is invalidated: {}", description.unwrap_or_default());
    }
}
