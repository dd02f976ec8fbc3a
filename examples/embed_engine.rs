//! An engine inside another program: one thread owns the model, others send it prompts and read the text as it comes.
//!
//!     cargo run --release --example embed_engine

use std::error::Error;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{
    DeepseekModel, Engine, EngineOptions, GenerationRequest, ModelError, RequestStream, SamplingParams, StreamEvent,
    Tokenizer,
};

const CHECKPOINT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-v3");

/// A prompt, and where its stream goes.
struct Job {
    prompt: String,
    max_new_tokens: usize,
    reply: Sender<Result<RequestStream, ModelError>>,
}

/// What clients have of the engine; clone it for each thread.
#[derive(Clone)]
struct Client(Sender<Job>);

impl Client {
    /// The text's stream. Whoever drops it cancels the request.
    fn submit(&self, prompt: &str, max_new_tokens: usize) -> Result<RequestStream, Box<dyn Error + Send + Sync>> {
        let (reply, answer) = channel();
        self.0.send(Job { prompt: prompt.into(), max_new_tokens, reply }).map_err(|_| "the engine has ended")?;
        // An engine that fails drops the other end.
        Ok(answer.recv().map_err(|_| "the engine has ended")??)
    }
}

/// Loads the model and works until all clients are gone and all requests done.
fn run_engine(jobs: Receiver<Job>) -> Result<(), ModelError> {
    let (dir, device) = (Path::new(CHECKPOINT), Device::flex());
    let model = DeepseekModel::load(dir, &device, FloatDType::F32, &mut |_| {})?;
    let tokenizer = Tokenizer::load(dir)?;
    let mut engine = Engine::new(&model, &tokenizer, EngineOptions { max_batch: 8, ..EngineOptions::on(&device) })?;
    loop {
        // Without requests there is nothing to do but wait; otherwise a job that is there joins the batch.
        let job = match engine.requests() {
            0 => match jobs.recv() {
                Ok(job) => Some(job),
                Err(_) => return Ok(()),
            },
            _ => jobs.try_recv().ok(),
        };
        if let Some(Job { prompt, max_new_tokens, reply }) = job {
            let stream = tokenizer.encode(&prompt, true).and_then(|prompt| {
                let sampling = SamplingParams::greedy();
                engine.submit(GenerationRequest { prompt, sampling, max_new_tokens, stop: vec![] })
            });
            // A prompt that is refused is its client's matter. One that nobody waits for is cancelled: its stream is dropped here.
            let _ = reply.send(stream);
        }
        engine.step()?;
    }
}

/// A client that reads to the end, piece by piece.
fn read_all(client: &Client, prompt: &str) -> Result<String, Box<dyn Error + Send + Sync>> {
    let mut text = String::new();
    for event in client.submit(prompt, 60)? {
        match event {
            StreamEvent::Text(piece) => text.push_str(&piece),
            StreamEvent::Finished(completion) => text += &format!(" [{}]", completion.finish.name()),
        }
    }
    Ok(text)
}

/// A client that has enough after the first piece: the request ends when `stream` is dropped.
fn read_some(client: &Client, prompt: &str) -> Result<String, Box<dyn Error + Send + Sync>> {
    let mut stream = client.submit(prompt, 10_000)?;
    match stream.next() {
        Some(StreamEvent::Text(piece)) => Ok(piece + " [dropped]"),
        _ => Err("no text".into()),
    }
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let (sender, jobs) = channel();
    let engine = thread::spawn(|| run_engine(jobs));
    let clients = ["hacker: n.", "kluge: /klooj/", "bug: n."].map(|prompt| {
        let client = Client(sender.clone());
        thread::spawn(move || {
            let read = if prompt.starts_with("bug") { read_some } else { read_all };
            read(&client, prompt).map(|text| format!("{prompt}{text}"))
        })
    });
    drop(sender); // the engine ends with the last client
    let texts = clients.map(|client| client.join().unwrap_or_else(|_| Err("a client panicked".into())));
    // Why the engine has ended says more than that it has.
    engine.join().map_err(|_| "the engine panicked")??;
    for text in texts {
        println!("{}\n", text?);
    }
    Ok(())
}
