//! Loads a checkpoint and prints how a text goes on.
//!
//!     cargo run --release --example complete -- assets/demo-v3 "hacker: n."

use std::{env, error::Error, io, io::Write, path::Path};

use burn::tensor::FloatDType;
use burn_mla::model::{DeepseekModel, GenerationOptions, GenerationRequest, SamplingParams, Tokenizer, generate};
use burn_mla::ops::DeviceName;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().collect();
    let [_, dir, text] = &args[..] else { return Err("expected a folder and a text".into()) };
    let device = DeviceName::Flex.open()?; // or Cuda(0), with FloatDType::BF16 below
    let model = DeepseekModel::load(Path::new(dir), &device, FloatDType::F32, &mut |_| {})?;
    let tokenizer = Tokenizer::load(Path::new(dir))?;
    let (prompt, sampling) = (tokenizer.encode(text, true)?, SamplingParams::greedy());
    let request = GenerationRequest { prompt, sampling, max_new_tokens: 100, stop: vec![] };
    let mut out = io::stdout();
    generate(&model, &tokenizer, &[request], &GenerationOptions::on(&device), &mut |_, text| {
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    })?;
    Ok(())
}
