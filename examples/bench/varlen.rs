//! Lengths that vary within a batch: those that FlashMLA's tests draw, and those of packed prompts.

/// The lengths of a batch of 128 around `s_k`, at least `s_q`: `normalvariate(s_k, s_k / 2)` of Python's `random` with
/// seed 0.
pub fn lengths(s_k: usize, s_q: usize) -> Vec<usize> {
    let length = |z: &f64| (s_k as f64 + z * (s_k as f64 / 2.0)).max(s_q as f64) as usize;
    NORMAL.iter().map(length).collect()
}

/// Lengths of so many packed prompts, spread over 128 to 1024 tokens; `peers/bench_ragged.py` has the same.
pub fn ragged(b: usize) -> Vec<usize> {
    (0..b).map(|i| 128 + i * 397 % 897).collect()
}

/// `[random.normalvariate(0, 1) for _ in range(128)]` after `random.seed(0)`; these digits give the same lengths.
#[rustfmt::skip]
#[allow(clippy::approx_constant, clippy::excessive_precision)]
const NORMAL: [f64; 128] = [
    -0.18386822, 0.03250413, 0.69882769, -0.09636785, 1.41350779, -1.53263587, 0.27093665, -1.20553438, -0.05314134,
    -0.29022427, -0.29282312, -2.10738838, 0.08473483, 0.62695318, 1.67933089, 0.83407200, -2.31505923, -1.22542461,
    0.94218139, -1.05855096, 0.20281626, -1.49459142, 0.78301783, 1.17349880, 0.27082259, 0.26854673, 0.18287560,
    -0.65520367, 0.56347987, -0.04423513, 0.11442393, 0.48617609, 1.65212646, 1.83577200, -0.24962240, 0.54837894,
    0.37675078, 1.44118179, -1.64175728, -0.84257024, 0.75714253, 0.60258197, -2.00669175, -1.83079419, 1.51007040,
    0.31830335, 0.58831266, 0.21402990, -0.81732847, -1.42532484, -0.92373438, -1.35644301, -0.31332251, 0.00649426,
    -0.80406540, 2.45750532, 0.90101381, -1.06074817, -0.11992755, -0.08249082, 0.24127972, -0.50318187, 0.77331782,
    0.10527054, 0.62405945, -1.08378812, -0.35599395, 0.60552688, 0.60443039, -0.42048149, -0.37351362, 0.37935424,
    1.49137750, -0.24565855, 0.59515319, 0.29190686, -0.12655675, -1.24304571, -0.04980953, -0.01350925, -0.29743942,
    0.24910993, -0.52393104, -0.40097027, 1.17385768, 2.02672522, -0.19291318, -0.70652513, -1.31252760, 0.39616207,
    0.88407901, 0.70306582, 1.43097831, 0.92659372, 1.91980979, -0.47355651, -1.21393198, -1.35847908, 0.56644535,
    0.21567283, -0.59659762, 0.11771438, -0.04949490, 0.04255918, -0.24738815, -0.16244448, 1.33283191, -0.51490323,
    0.59709216, -1.28121386, 0.34820551, 0.45658092, -1.39278512, 0.05911884, -0.04703499, 0.53313489, -1.84008348,
    -0.18393763, -0.25693810, -1.08591296, 0.98008496, -0.75644144, -0.46127761, -0.50432435, 1.28396346, 1.05596051,
    -0.00533495, 0.36560584,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The peers time prompts of the same lengths.
    #[test]
    fn packed_prompts_are_those_of_the_peers() {
        let lengths = ragged(64);
        assert_eq!((lengths[1], lengths[63], lengths.iter().sum::<usize>()), (525, 920, 37_124));
        assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&128), Some(&1023)));
    }

    /// Sums and maxima of what Python draws.
    #[test]
    fn lengths_are_those_of_python() {
        for (s_k, s_q, sum, max) in [
            (4096, 1, 526_961, 9128),
            (8192, 1, 1_053_982, 18_257),
            (16384, 2, 2_108_021, 36_515),
            (32768, 2, 4_216_083, 73_031),
        ] {
            let lengths = lengths(s_k, s_q);
            assert_eq!((lengths.len(), lengths.iter().sum(), lengths.iter().max()), (128, sum, Some(&max)));
        }
    }
}
