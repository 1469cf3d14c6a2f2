//! Prompts to tokens and tokens to text.

use std::num::NonZero;
use std::ops::ControlFlow;

use crate::common::*;
use marlinspike_generate::run::{Ended, Options};
use marlinspike_generate::sample::Sampling;
use marlinspike_generate::text::{Message, Text, TextError};

#[test]
fn prompts_have_the_tokens_of_the_tokenizers_package() {
    for name in NAMES {
        let text = Text::open(&golden(name)).unwrap();
        let prompt = "The lighthouse keeper counts the waves: one, two, three";
        assert_eq!(text.encode(prompt).unwrap(), Expected::read(name).input_ids);
        assert_eq!(text.stop(), [2, 0]);
    }
}

#[test]
fn a_conversation_follows_the_chat_template() {
    let text = Text::open(&golden("qwen3-moe-tiny")).unwrap();
    let messages = [Message { role: "user", content: "the waves" }];
    let found = text.encode_chat(&messages).unwrap();
    let plain =
        text.encode("<|im_start|>user\nthe waves<|im_end|>\n<|im_start|>assistant\n").unwrap();
    assert_eq!(found, plain);
    // The two special tokens are one token each.
    assert_eq!(found.iter().filter(|&&id| id == 1).count(), 2);
    assert_eq!(found.iter().filter(|&&id| id == 2).count(), 1);
}

#[test]
fn streamed_pieces_joined_are_the_text_and_no_character_is_cut() {
    let text = Text::open(&golden("qwen3-moe-tiny")).unwrap();
    let written = "the wäves: 波 and 🌊🌊, ￿ one\u{301} two";
    let tokens = text.encode(written).unwrap();
    let mut stream = text.stream();
    let pieces: Vec<String> = tokens.iter().map(|&t| stream.push(t).unwrap()).collect();
    assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
    assert!(pieces.iter().filter(|p| p.is_empty()).count() >= 6, "{pieces:?}");
    assert_eq!(pieces.concat() + &stream.finish().unwrap(), written);
    // A text that ends inside a character.
    let mut stream = text.stream();
    let cut: String = tokens[..tokens.len() - 5].iter().map(|&t| stream.push(t).unwrap()).collect();
    let cut = cut + &stream.finish().unwrap();
    assert!(written.starts_with(cut.trim_end_matches('\u{fffd}')), "{cut}");
}

#[test]
fn missing_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Text::open(folder.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }), "{error}");
    std::fs::write(folder.path().join("tokenizer.json"), "{\"version\": 3}").unwrap();
    let message = Text::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json"), "{message}");
    let source = golden("mixtral-tiny").join("tokenizer.json");
    std::fs::copy(source, folder.path().join("tokenizer.json")).unwrap();
    let text = Text::open(folder.path()).unwrap();
    let messages = [Message { role: "user", content: "x" }];
    let message = text.encode_chat(&messages).unwrap_err().to_string();
    assert!(message.contains("found no chat template"), "{message}");
    std::fs::write(folder.path().join("generation_config.json"), "{\"eos_token_id\": \"2\"}")
        .unwrap();
    let message = Text::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("eos_token_id") && message.contains("generation_config"), "{message}");
}

#[test]
fn generation_stops_at_its_length_at_a_stop_token_or_when_the_caller_wants() {
    let name = "qwen3-moe-tiny";
    let Expected { input_ids, new_tokens, .. } = Expected::read(name);
    with_decoder(&golden(name), |decoder| {
        let run = |options: &Options| {
            let mut seen = Vec::new();
            let done = decoder.generate(&input_ids, options, |token| {
                seen.push(token);
                ControlFlow::Continue(())
            });
            let done = done.unwrap();
            assert_eq!(done.tokens, seen);
            done
        };
        let greedy = Options::greedy(new_tokens.len());
        let done = run(&greedy);
        assert_eq!((&done.tokens, done.ended), (&new_tokens, Ended::Length));
        for chunk in 1..=input_ids.len() {
            let done = run(&Options { chunk: NonZero::new(chunk), ..greedy.clone() });
            assert_eq!(done.tokens, new_tokens, "{chunk}");
        }
        let stop = vec![9999, new_tokens[3]];
        let done = run(&Options { stop, ..greedy.clone() });
        assert_eq!((&done.tokens[..], done.ended), (&new_tokens[..3], Ended::Stop(new_tokens[3])));
        let done = decoder.generate(&input_ids, &greedy, |_| ControlFlow::Break(())).unwrap();
        assert_eq!((&done.tokens[..], done.ended), (&new_tokens[..1], Ended::Caller));
        assert!(run(&Options::greedy(0)).tokens.is_empty());
        // A draw from the best token alone is the greedy one.
        let sampling = Sampling::Random { temperature: 2.0, top_k: Some(1), top_p: None, seed: 4 };
        assert_eq!(run(&Options { sampling, ..greedy.clone() }).tokens, new_tokens);
        let sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: None, seed: 4 };
        let random = Options { sampling, ..greedy };
        assert_eq!(run(&random).tokens, run(&random).tokens);
        assert_ne!(run(&random).tokens, new_tokens);
    });
}

/// A folder with a golden tokenizer, changed.
fn tokenizer(change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(golden("qwen3-moe-tiny").join("tokenizer.json")).unwrap();
    let mut value = serde_json::from_slice(&bytes).unwrap();
    change(&mut value);
    std::fs::write(folder.path().join("tokenizer.json"), value.to_string()).unwrap();
    folder
}

#[test]
fn a_tokenizer_that_panics_is_an_error_that_names_the_file() {
    // Strips more characters than a token has.
    let folder = tokenizer(|t| {
        t["decoder"] = serde_json::json!({"type": "Strip", "content": "t", "start": 0, "stop": 9});
    });
    let text = Text::open(folder.path()).unwrap();
    let tokens = text.encode("t").unwrap();
    let message = text.stream().push(tokens[0]).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json: the tokenizer failed"), "{message}");
}

#[test]
fn prompts_are_neither_cut_nor_filled_up_as_the_tokenizer_states() {
    let prompt = "the waves and the wind";
    let expected = Text::open(&golden("qwen3-moe-tiny")).unwrap().encode(prompt).unwrap();
    let folder = tokenizer(|t| {
        t["truncation"] = serde_json::json!({
            "max_length": 3, "stride": 5, "strategy": "LongestFirst", "direction": "Right",
        });
        t["padding"] = serde_json::json!({
            "strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
        });
    });
    assert_eq!(Text::open(folder.path()).unwrap().encode(prompt).unwrap(), expected);
}
