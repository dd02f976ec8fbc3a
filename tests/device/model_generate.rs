//! Text generation with the demo checkpoints.

use burn::tensor::Device;
use burn_mla::model::{
    Completion, DeepseekModel, FinishReason, GenerationOptions, GenerationRequest, SamplingParams, Tokenizer, generate,
};
use rstest::rstest;

use crate::devices::{for_each_device, is_wgpu, skip};
use crate::model_parity::{folder, load};

const V3: &str = "assets/demo-v3";
const V4: &str = "assets/demo-v4";
/// How the entry goes on that the checkpoints have learnt by heart.
const ENTRY: &str = "[originally, someone who makes furniture with an axe]\n\n1. A person who enjoys exploring the details \
                     of programmable systems and how to stretch their capabilities";

struct Demo {
    model: DeepseekModel,
    tokenizer: Tokenizer,
}

impl Demo {
    fn new(name: &str) -> Self {
        Self::on(name, &Device::flex())
    }

    fn on(name: &str, device: &Device) -> Self {
        let tokenizer = Tokenizer::load(&folder(name)).expect("the tokenizer loads");
        Self { model: load(name, device), tokenizer }
    }

    fn request(&self, prompt: &str, max_new_tokens: usize) -> GenerationRequest {
        let prompt = self.tokenizer.encode(prompt, true).expect("the prompt is text");
        GenerationRequest { prompt, sampling: SamplingParams::greedy(), max_new_tokens, stop: Vec::new() }
    }

    /// Completions, and the pieces of text that were streamed.
    fn run(&self, requests: &[GenerationRequest], options: &GenerationOptions) -> (Vec<Completion>, Vec<Vec<String>>) {
        let mut pieces = vec![Vec::new(); requests.len()];
        let on_text = &mut |request: usize, text: &str| pieces[request].push(text.to_string());
        let result = generate(&self.model, &self.tokenizer, requests, options, on_text);
        (result.expect("the requests are sound").0, pieces)
    }

    fn text(&self, request: GenerationRequest) -> String {
        self.run(&[request], &GenerationOptions::default()).0.remove(0).text
    }
}

#[rstest]
fn model_recites_an_entry(#[values(V3, V4)] name: &str) {
    for_each_device(|device| {
        if is_wgpu(device) && name == V4 {
            skip(device, format_args!("{name}: the parity tests run DeepSeek-V4 here"));
            return;
        }
        let demo = Demo::on(name, device);
        let (completions, pieces) = demo.run(&[demo.request("hacker: n.", 60)], &GenerationOptions::default());
        assert!(completions[0].text.trim_start().starts_with(ENTRY), "{}", completions[0].text);
        assert_eq!(pieces[0].concat(), completions[0].text);
        assert!(pieces[0].len() > 20, "streamed in {} pieces", pieces[0].len());
        assert_eq!((completions[0].token_ids.len(), &completions[0].finish), (60, &FinishReason::MaxNewTokens));
    });
}

#[rstest]
fn model_text_depends_on_no_size(
    #[values(V3, V4)] name: &str,
    // With fewer tokens than prompts the prompts come one after the other.
    #[values(1, 5, 11, 20, 516)] token_budget: usize,
    #[values(1, 64)] page_size: usize,
) {
    let demo = Demo::new(name);
    let prompts = ["hacker: n.", "kluge: /klooj/", "The Tao of", "foo"];
    let requests = prompts.map(|prompt| demo.request(prompt, 40));
    let options = GenerationOptions { page_size, token_budget, ..Default::default() };
    let together = demo.run(&requests, &options).0;
    for (request, completion) in requests.into_iter().zip(together) {
        assert_eq!(completion.text, demo.text(request));
    }
}

#[rstest]
fn model_draws_the_same_text_for_a_seed(#[values(V3, V4)] name: &str) {
    let demo = Demo::new(name);
    let draw = |seed| {
        let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::greedy() };
        demo.text(GenerationRequest { sampling, ..demo.request("foo", 40) })
    };
    assert_eq!(draw(1), draw(1));
    // They have learnt their text by heart, so that two seeds may well agree.
    assert!((2..10).any(|seed| draw(seed) != draw(1)));
}

#[rstest]
fn model_stops_at_a_stop_string(#[values(V3, V4)] name: &str) {
    let demo = Demo::new(name);
    let request = GenerationRequest { stop: vec!["furniture with".into()], ..demo.request("hacker: n.", 60) };
    let (completions, pieces) = demo.run(&[request], &GenerationOptions::default());
    assert_eq!(completions[0].text.trim_start(), "[originally, someone who makes ");
    assert_eq!(completions[0].finish, FinishReason::StopString);
    assert_eq!(pieces[0].concat(), completions[0].text);
}

#[rstest]
fn model_ends_at_its_end_token(#[values(V3, V4)] name: &str) {
    let demo = Demo::new(name);
    let completion = demo.run(&[demo.request("hacker: n.", 2000)], &GenerationOptions::default()).0.remove(0);
    assert_eq!(completion.finish, FinishReason::Eos);
    assert_eq!(completion.token_ids.last(), Some(&1));
    assert!(!completion.text.contains("<eos>"));
}

/// A cache that is too small ends one request; it keeps its text, and the others are not disturbed.
#[rstest]
fn model_keeps_all_text_when_the_cache_is_full(#[values(V3, V4)] name: &str) {
    let demo = Demo::new(name);
    let requests = [demo.request("hacker: n.", 400), demo.request("foo", 10)];
    let options = GenerationOptions { page_size: 16, cache_pages: Some(6), ..Default::default() };
    let (completions, pieces) = demo.run(&requests, &options);
    assert!(matches!(completions[0].finish, FinishReason::OutOfCache(_)), "{:?}", completions[0].finish);
    assert!(completions[0].token_ids.len() > 60);
    assert!(completions[0].text.trim_start().starts_with(ENTRY));
    assert_eq!(pieces[0].concat(), completions[0].text);
    assert_eq!(completions[1].finish, FinishReason::MaxNewTokens);
    assert_eq!(completions[1].text, demo.text(requests[1].clone()));
}

#[rstest]
fn model_generates_nothing_when_asked_for_nothing(#[values(V3, V4)] name: &str) {
    let demo = Demo::new(name);
    let completion = demo.run(&[demo.request("foo", 0)], &GenerationOptions::default()).0.remove(0);
    assert_eq!((completion.text.as_str(), completion.token_ids.len()), ("", 0));
}
