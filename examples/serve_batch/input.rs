//! Lines from a file or stdin, read by a thread of its own: a pipe may be slow, and the engine does not wait for it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::time::Duration;

/// Lines that are read ahead.
const AHEAD: usize = 64;
/// How long an idle program waits before it looks whether it has been interrupted.
const PATIENCE: Duration = Duration::from_millis(50);

/// The lines to come.
pub struct Input {
    lines: Receiver<io::Result<Vec<u8>>>,
    number: usize,
    name: String,
    ended: bool,
}

/// What there is to read.
pub enum Next {
    /// A line that is not empty, and its number.
    Line(usize, Vec<u8>),
    /// Nothing yet.
    Pending,
    End,
}

impl Input {
    /// Opens the file; `-` is stdin.
    pub fn open(path: &Path) -> Result<Self, String> {
        let stdin = path == Path::new("-");
        let name = if stdin { "stdin".to_string() } else { path.display().to_string() };
        let reader: Box<dyn BufRead + Send> = match stdin {
            true => Box::new(BufReader::new(io::stdin())),
            false => {
                let file = File::open(path).map_err(|error| format!("cannot read {name}: {error}"))?;
                Box::new(BufReader::new(file))
            }
        };
        let (sender, lines) = sync_channel(AHEAD);
        std::thread::spawn(move || {
            for line in reader.split(b'\n') {
                let failed = line.is_err();
                if sender.send(line).is_err() || failed {
                    break;
                }
            }
        });
        Ok(Self { lines, number: 0, name, ended: false })
    }

    /// The next line; with `wait`, after a moment if there is none yet.
    pub fn next(&mut self, wait: bool) -> Result<Next, String> {
        while !self.ended {
            let line = match wait {
                true => self.lines.recv_timeout(PATIENCE),
                false => self.lines.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
            };
            match line {
                Ok(line) => {
                    self.number += 1;
                    let line =
                        line.map_err(|error| format!("cannot read {}: line {}: {error}", self.name, self.number))?;
                    if !line.trim_ascii().is_empty() {
                        return Ok(Next::Line(self.number, line));
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(Next::Pending),
                Err(RecvTimeoutError::Disconnected) => self.ended = true,
            }
        }
        Ok(Next::End)
    }
}
