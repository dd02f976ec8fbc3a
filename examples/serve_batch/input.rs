//! Lines from a file, a pipe or stdin, read and made requests by a thread of its own: a pipe may be slow and a prompt long, and the
//! engine waits for neither.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use crate::file_id::FileId;
use crate::request::{Line, LineError, Reader};

/// Requests that are read ahead.
const AHEAD: usize = 64;
/// Bytes of a line: a million tokens with every character escaped.
const MOST: usize = 16 << 20;
/// How long an idle program waits before it looks whether it has been interrupted.
const PATIENCE: Duration = Duration::from_millis(50);

/// Where lines come from.
pub struct Source {
    name: String,
    file: Option<Opening>,
}

enum Opening {
    Open(File),
    /// Opened by the thread that reads: it may wait until somebody writes.
    Pipe(PathBuf),
}

impl Source {
    /// Looks the file up; `-` is stdin.
    pub fn new(path: &Path) -> Result<Self, String> {
        if path == Path::new("-") {
            return Ok(Self { name: "stdin".into(), file: None });
        }
        let name = path.display().to_string();
        let failed = |error: &dyn std::fmt::Display| format!("cannot read {name}: {error}");
        let kind = std::fs::metadata(path).map_err(|error| failed(&error))?;
        if kind.is_dir() {
            return Err(failed(&"it is a folder"));
        }
        let file = match is_pipe(&kind) {
            true => Opening::Pipe(path.into()),
            false => Opening::Open(File::open(path).map_err(|error| failed(&error))?),
        };
        Ok(Self { name, file: Some(file) })
    }

    /// What is read, if that can be told.
    pub fn id(&self) -> Option<FileId> {
        match &self.file {
            None => FileId::of_stdin(),
            Some(Opening::Open(file)) => FileId::of(file.metadata()),
            Some(Opening::Pipe(path)) => FileId::of(std::fs::metadata(path)),
        }
    }

    /// Reads on; lines become requests by `reader`.
    pub fn read(self, reader: Reader) -> Input {
        let (sender, lines) = sync_channel(AHEAD);
        let Self { name, file } = self;
        std::thread::spawn(move || {
            let file: io::Result<Box<dyn Read>> = match file {
                None => Ok(Box::new(io::stdin())),
                Some(Opening::Open(file)) => Ok(Box::new(file)),
                Some(Opening::Pipe(path)) => File::open(path).map(|file| Box::new(file) as Box<dyn Read>),
            };
            let outcome = file.and_then(|file| send(Lines::new(BufReader::new(file)), &reader, &sender));
            if let Err(error) = outcome {
                let _ = sender.send(Next::Failed(format!("cannot read {name}: {error}")));
            }
        });
        Input { lines, ended: false }
    }
}

fn is_pipe(kind: &std::fs::Metadata) -> bool {
    #[cfg(unix)]
    return std::os::unix::fs::FileTypeExt::is_fifo(&kind.file_type());
    #[cfg(not(unix))]
    {
        let _ = kind;
        false
    }
}

/// Until the end, or until nobody listens.
fn send(mut lines: Lines<impl BufRead>, reader: &Reader, sender: &SyncSender<Next>) -> io::Result<()> {
    while let Some((number, text)) = lines.next()? {
        let line = match text {
            Some(text) if text.trim_ascii().is_empty() => continue,
            Some(text) => Line::parse(&text, number, reader),
            None => Err(LineError::TooLong { most: MOST }),
        };
        if sender.send(Next::Line(number, Box::new(line))).is_err() {
            break;
        }
    }
    Ok(())
}

/// Lines of bounded length.
struct Lines<R> {
    reader: R,
    number: usize,
    /// The rest of a line that is too long.
    skipping: bool,
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R) -> Self {
        Self { reader, number: 0, skipping: false }
    }

    /// The next line and its number; without its text, of which no more is read at once, where it is too long.
    fn next(&mut self) -> io::Result<Option<(usize, Option<Vec<u8>>)>> {
        while self.skipping {
            let buffer = self.reader.fill_buf()?;
            let end = buffer.iter().position(|&byte| byte == b'\n');
            self.skipping = end.is_none() && !buffer.is_empty();
            let read = end.map_or(buffer.len(), |end| end + 1);
            self.reader.consume(read);
        }
        let mut line = Vec::new();
        if self.reader.by_ref().take(MOST as u64 + 1).read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if line.len() > MOST {
            self.skipping = true;
            return Ok(Some((self.number, None)));
        }
        Ok(Some((self.number, Some(line))))
    }
}

/// The requests to come.
pub struct Input {
    lines: Receiver<Next>,
    ended: bool,
}

/// What there is to read.
pub enum Next {
    /// What a line that is not empty became, and its number.
    Line(usize, Box<Result<Line, LineError>>),
    /// Nothing yet.
    Pending,
    End,
    /// The input cannot be read to its end.
    Failed(String),
}

impl Input {
    /// The next line; with `wait`, after a moment if there is none yet.
    pub fn next(&mut self, wait: bool) -> Next {
        if self.ended {
            return Next::End;
        }
        let line = match wait {
            true => self.lines.recv_timeout(PATIENCE),
            false => self.lines.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
        };
        match line {
            Ok(next) => next,
            Err(RecvTimeoutError::Timeout) => Next::Pending,
            Err(RecvTimeoutError::Disconnected) => {
                self.ended = true;
                Next::End
            }
        }
    }
}
