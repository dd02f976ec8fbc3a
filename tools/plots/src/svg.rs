//! Text and lines that can be read on a white page and on a dark one: of both the contrast (WCAG 2.1) is 3 or more, of text 4.

/// Of text and axes.
const GREY: &str = "#6e7781";
const OURS: &str = "#d9570f";
const PEERS: [&str; 3] = ["#2f81f7", "#a371f7", "#2da44e"];

/// A picture that grows.
pub struct Svg {
    size: [f64; 2],
    body: String,
}

/// Where a text has its x.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    pub fn new(size: [f64; 2]) -> Self {
        Self { size, body: String::new() }
    }

    /// A text, with further attributes.
    pub fn text(&mut self, [x, y]: [f64; 2], anchor: Anchor, more: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.body += &format!("<text x=\"{}\" y=\"{}\"{anchor}{more}>{text}</text>\n", short(x), short(y));
    }

    /// A path that is filled.
    pub fn area(&mut self, color: &str, d: &str) {
        self.body += &format!("<path fill=\"{color}\" d=\"{d}\"/>\n");
    }

    /// A path that is drawn, with further attributes.
    pub fn line(&mut self, color: &str, d: &str, more: &str) {
        self.body += &format!("<path fill=\"none\" stroke=\"{color}\" d=\"{d}\"{more}/>\n");
    }

    /// A thin line of an axis, a grid or a bound.
    pub fn rule(&mut self, d: &str, more: &str) {
        self.line(GREY, d, more);
    }

    /// Squares of the programs' colours with their names, from a point to the right.
    pub fn legend(&mut self, [mut x, y]: [f64; 2], peers: &[&str]) {
        for (number, peer) in peers.iter().enumerate() {
            self.area(color(number), &format!("M{} {}h9v9h-9z", short(x), short(y - 9.0)));
            self.text([x + 13.0, y], Anchor::Start, "", peer);
            x += 30.0 + 6.3 * peer.len() as f64;
        }
    }

    /// The file.
    pub fn finish(self, title: &str) -> String {
        let [width, height] = self.size.map(short);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"11\" fill=\"{GREY}\">\n<title>{title}</title>\n{}</svg>\n",
            self.body
        )
    }
}

/// Of a program by its place in the list; the first is ours.
pub fn color(number: usize) -> &'static str {
    number.checked_sub(1).map_or(OURS, |number| PEERS[number % PEERS.len()])
}

/// A coordinate to a tenth.
pub fn short(x: f64) -> String {
    let text = format!("{x:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

/// A number as one reads it: three digits, or thousands with commas.
pub fn number(value: f64) -> String {
    if value < 9.95 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
