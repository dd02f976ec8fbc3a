//! PTX text to a [`Module`]: what is written, before it means anything.
//!
//! The grammar is that of PTX ISA 4 (Syntax) and 5 (State Spaces), as far as NVRTC emits it for our kernels.
mod ast;
mod body;
mod lexer;
mod operand;

pub use ast::{Entry, Guard, Instr, Loc, Module, Operand, Parameter, RegType, Scope, Variable};

use crate::error::ParseError;
use lexer::{Tok, Token};

/// Parses a PTX module.
///
/// # Errors
/// [`ParseError`] with the line, for text that is no PTX or a directive that we do not know.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    Parser { tokens: lexer::tokens(text)?, at: 0 }.module()
}

/// A position in the tokens of a module.
struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<Tok<'a>> {
        self.tokens.get(self.at).map(|t| t.tok)
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(0, |t| t.line)
    }

    fn next(&mut self) -> Result<Tok<'a>, ParseError> {
        let tok = self.peek().ok_or_else(|| self.error("more text, not the end"))?;
        self.at += 1;
        Ok(tok)
    }

    /// An error at the next token.
    fn error(&self, expected: &str) -> ParseError {
        let found = self.peek().map_or("the end of the text".to_string(), |t| t.to_string());
        ParseError { line: self.line(), expected: expected.to_string(), found }
    }

    fn eat(&mut self, punct: char) -> bool {
        let hit = self.peek() == Some(Tok::Punct(punct));
        self.at += usize::from(hit);
        hit
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let hit = self.peek() == Some(Tok::Word(word));
        self.at += usize::from(hit);
        hit
    }

    fn expect(&mut self, punct: char) -> Result<(), ParseError> {
        if self.eat(punct) { Ok(()) } else { Err(self.error(&format!("'{punct}'"))) }
    }

    fn word(&mut self) -> Result<&'a str, ParseError> {
        match self.peek() {
            Some(Tok::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.error("a name")),
        }
    }

    fn number(&mut self) -> Result<u64, ParseError> {
        let error = self.error("a whole number");
        match self.next()? {
            Tok::Number(text) => operand::integer(text).ok_or(error),
            _ => Err(error),
        }
    }

    /// Skips to behind the next `end` outside braces.
    fn skip_past(&mut self, end: char) -> Result<(), ParseError> {
        let mut depth = 0;
        loop {
            match self.next()? {
                Tok::Punct('{') => depth += 1,
                Tok::Punct('}') => {
                    depth -= 1;
                    if depth == 0 && end == '}' {
                        return Ok(());
                    }
                }
                Tok::Punct(c) if c == end && depth == 0 => return Ok(()),
                _ => {}
            }
        }
    }

    fn module(mut self) -> Result<Module, ParseError> {
        let mut module = Module::default();
        while self.peek().is_some() {
            match self.word()? {
                ".version" => module.version = self.next()?.to_string(),
                ".target" => {
                    module.target = self.word()?.to_string();
                    while self.eat(',') {
                        self.word()?;
                    }
                }
                ".address_size" => {
                    self.number()?;
                }
                ".visible" | ".weak" => {}
                // A variable of another module is only known for dynamic shared memory.
                ".extern" => {
                    let space = self.word()?;
                    let variable = self.variable(true)?;
                    if space == ".shared" { module.shared.push(variable) } else { module.globals.push(variable) }
                }
                ".shared" => module.shared.push(self.variable(false)?),
                ".global" | ".const" => module.globals.push(self.variable(false)?),
                ".entry" => module.entries.push(self.entry()?),
                ".file" => {
                    let id = self.number()? as u32;
                    let Tok::Text(name) = self.next()? else { return Err(self.error("a file name")) };
                    module.files.insert(id, name.to_string());
                    while self.eat(',') {
                        self.number()?;
                    }
                }
                ".section" => self.skip_past('}')?,
                _ => {
                    self.at -= 1;
                    return Err(self.error("a module directive that we know"));
                }
            }
        }
        Ok(module)
    }

    /// `.align 16 .b8 name[64];` behind its space (PTX ISA 5.4).
    fn variable(&mut self, external: bool) -> Result<Variable, ParseError> {
        let (align, element) = self.alignment()?;
        let name = self.word()?.to_string();
        let mut bytes = element;
        while self.eat('[') {
            bytes = if self.peek() == Some(Tok::Punct(']')) { 0 } else { bytes * self.number()? };
            self.expect(']')?;
        }
        let mut initial = Vec::new();
        if self.eat('=') {
            self.initial(element as usize, &mut initial)?;
        }
        self.expect(';')?;
        Ok(Variable { name, align, bytes, external, initial })
    }

    /// An initial value: a constant, a text, or values in braces (PTX ISA 5.4.4).
    fn initial(&mut self, element: usize, bytes: &mut Vec<u8>) -> Result<(), ParseError> {
        if self.eat('{') {
            while !self.eat('}') {
                self.initial(element, bytes)?;
                self.eat(',');
            }
            return Ok(());
        }
        if let Some(Tok::Text(text)) = self.peek() {
            self.at += 1;
            bytes.extend(text.as_bytes());
            return Ok(());
        }
        let error = self.error("a constant");
        let bits = match self.operand()? {
            Operand::Int(bits) | Operand::F64(bits) => bits,
            Operand::F32(bits) => u64::from(bits),
            _ => return Err(error),
        };
        bytes.extend(&bits.to_le_bytes()[..element.min(8)]);
        Ok(())
    }

    /// Alignment and bytes of one element: `.align 4 .b8`, and what may stand between.
    fn alignment(&mut self) -> Result<(u64, u64), ParseError> {
        let mut align = None;
        loop {
            match self.word()? {
                ".align" => align = Some(self.number()?),
                ".ptr" | ".attribute" | ".global" => {}
                ty => {
                    self.at -= 1;
                    let bytes = RegType::parse(ty).map(|t| u64::from(t.bits()) / 8);
                    let bytes = bytes.ok_or_else(|| self.error("a type"))?;
                    self.at += 1;
                    return Ok((align.unwrap_or(bytes), bytes));
                }
            }
        }
    }

    fn entry(&mut self) -> Result<Entry, ParseError> {
        let mut entry = Entry { name: self.word()?.to_string(), ..Entry::default() };
        if self.eat('(') {
            while !self.eat(')') {
                entry.params.push(self.parameter()?);
                self.eat(',');
            }
        }
        while !self.eat('{') {
            match self.word()? {
                ".maxntid" => entry.max_threads = Some(self.triple()?),
                ".reqntid" => entry.required_threads = Some(self.triple()?),
                ".reqnctapercluster" => entry.cluster = Some(self.triple()?),
                ".maxnreg" => entry.max_registers = Some(self.number()? as u32),
                ".minnctapersm" | ".maxclusterrank" => {
                    self.number()?;
                }
                ".explicitcluster" | ".noreturn" => {}
                _ => {
                    self.at -= 1;
                    return Err(self.error("a performance directive that we know"));
                }
            }
        }
        self.body(&mut entry)?;
        Ok(entry)
    }

    /// `.param .u64 name` or `.param .align 4 .b8 name[48]` (PTX ISA 5.1, kernel function parameters).
    fn parameter(&mut self) -> Result<Parameter, ParseError> {
        if !self.eat_word(".param") {
            return Err(self.error("'.param'"));
        }
        let (mut align, mut bytes) = self.alignment()?;
        // `.ptr .global .align 16`: what the pointer points at, not how the parameter lies.
        while let Some(Tok::Word(".ptr" | ".global" | ".shared" | ".const" | ".local")) = self.peek() {
            self.at += 1;
        }
        if self.eat_word(".align") {
            self.number()?;
            align = bytes;
        }
        let name = self.word()?.to_string();
        if self.eat('[') {
            bytes *= self.number()?;
            self.expect(']')?;
        }
        Ok(Parameter { name, align, bytes })
    }

    /// `128, 1, 1`, where what is left out is 1.
    fn triple(&mut self) -> Result<[u32; 3], ParseError> {
        let mut values = [self.number()? as u32, 1, 1];
        for value in &mut values[1..] {
            if self.eat(',') {
                *value = self.number()? as u32;
            }
        }
        Ok(values)
    }
}
