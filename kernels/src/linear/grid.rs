//! Which rows and which matrix a cube of a projection has: counted when it is launched ([`Grid`]), found in the kernel ([`Part`],
//! [`Tile`]).

use cubecl::prelude::*;

use crate::common::launch::{dummy, is_row};
use crate::experts_mlp::sort::{TILE, max_tiles};
use crate::linear::sizes::pairs;
use crate::linear::{ExpertsOf, OtherMatrix, PairRows, Products, SharedMatrix, WeightArg, WeightFormat, Work};
use crate::route_experts::RouteArgs;

/// How a kernel finds its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rows {
    /// Rows are their own numbers.
    Dense,
    /// A row for each token and head.
    Heads,
    /// See [`PairRows::Gather`].
    Gather,
    /// See [`PairRows::Scatter`].
    Scatter,
    /// The one row is that of each pair of [`Work::Token`].
    TokenGather,
    /// Pairs of [`Work::Token`] have their own rows.
    TokenScatter,
}

/// What the small-batch kernels are launched with.
pub(crate) struct Grid {
    pub order: BufferArg,
    /// Of a single token its experts, unless they are in `route`.
    pub tiles: BufferArg,
    /// The choice of a single token's experts, which cubes make for themselves.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only kernels with matrix instructions make it"))]
    pub route: Option<RouteArgs>,
    pub rows: Rows,
    /// Pairs or heads of a token, or 1.
    pub per_token: usize,
    /// Tokens where tiles are not listed; of a single token how many experts there are.
    pub tokens: usize,
    /// Tiles at most.
    pub max_tiles: usize,
    /// A matrix beside the others: see [`OtherMatrix`] and [`SharedMatrix`].
    pub second: WeightArg,
    pub second_out: BufferArg,
    /// Its width, where it has another one than the others; 0 without one.
    pub second_width: usize,
    /// Dense matrices beside those.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only kernels with matrix instructions take them"))]
    pub more: Vec<OtherMatrix>,
    /// Groups of outputs that a cube takes one after the other.
    pub groups: usize,
}

impl Grid {
    /// The grid of tiles of `tile` tokens, where the first matrix has so many outputs, in this format.
    pub(super) fn new(client: &Client, work: Work, tile: usize, first: (usize, WeightFormat)) -> Self {
        let unlisted = |rows, per_token, tokens, max_tiles| Self {
            order: dummy(client),
            tiles: dummy(client),
            route: None,
            rows,
            per_token,
            tokens,
            max_tiles,
            second: WeightArg::none(client),
            second_out: dummy(client),
            second_width: 0,
            more: Vec::new(),
            groups: 1,
        };
        match work {
            Work::Dense { rows, others } => {
                let grid = unlisted(Rows::Dense, 1, rows, rows.div_ceil(tile));
                let mut others = others.into_iter().peekable();
                match others.next_if(|other| pairs(first, (other.outputs, other.weight.format()))) {
                    Some(OtherMatrix { weight, out, outputs }) => {
                        let more = others.collect();
                        Self { second: weight, second_out: out, second_width: outputs, more, ..grid }
                    }
                    None => Self { more: others.collect(), ..grid },
                }
            }
            Work::Heads { rows, heads, .. } => unlisted(Rows::Heads, heads, rows, rows.div_ceil(tile) * heads),
            Work::Experts { order, tiles, pairs, experts, rows } => {
                let (rows, per_token) = match rows {
                    PairRows::Gather { top_k } => (Rows::Gather, top_k),
                    PairRows::Scatter => (Rows::Scatter, 1),
                };
                let max_tiles = max_tiles(pairs, experts, tile);
                Self { order, tiles, rows, per_token, max_tiles, ..unlisted(rows, per_token, 0, max_tiles) }
            }
            Work::Token { experts_of, pairs, experts, rows, shared } => {
                let rows = match rows {
                    PairRows::Gather { .. } => Rows::TokenGather,
                    PairRows::Scatter => Rows::TokenScatter,
                };
                let grid = unlisted(rows, 1, experts, pairs);
                let grid = match experts_of {
                    ExpertsOf::Listed(tiles) => Self { tiles, ..grid },
                    ExpertsOf::Routed(route) => Self { route: Some(*route), ..grid },
                };
                match shared {
                    Some(SharedMatrix { weight, width }) => Self { second: weight, second_width: width, ..grid },
                    None => grid,
                }
            }
        }
    }

    /// Cubes for matrices with so many outputs, of which a cube has so many.
    pub(crate) fn cubes(&self, outputs: usize, each: usize) -> usize {
        let of_second = match self.rows {
            _ if self.second_width == 0 => 0,
            Rows::Dense => self.second_width.div_ceil(each) * self.max_tiles,
            Rows::TokenGather => self.second_width.div_ceil(each),
            _ => outputs.div_ceil(each),
        };
        let of_more = |other: &OtherMatrix| other.outputs.div_ceil(each) * self.max_tiles;
        of_second + outputs.div_ceil(each) * self.max_tiles + self.more.iter().map(of_more).sum::<usize>()
    }

    /// What kernels that load so many elements at once are told.
    pub(super) fn sizes(&self, products: &Products, vector: usize) -> SizesLaunch {
        let &Products { inputs, outputs, carried, matrix_stride, .. } = products;
        let by_vectors = self.rows == Rows::TokenScatter;
        let second_width = if by_vectors { self.second_width / vector } else { self.second_width };
        SizesLaunch::new(
            inputs / vector,
            outputs,
            carried / vector,
            matrix_stride / vector,
            self.per_token,
            self.tokens,
            self.max_tiles,
            second_width,
            self.groups,
        )
    }
}

/// The sizes of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Sizes {
    /// Vectors of a row of x, without those that are carried.
    pub vectors: usize,
    /// Rows of a matrix; of a gated output, of each half.
    pub outputs: usize,
    /// Vectors of a row of x that are copied behind its products.
    pub carried: usize,
    /// Vectors from one matrix to the next.
    pub matrix_stride: usize,
    /// See [`Grid::per_token`].
    pub per_token: usize,
    /// See [`Grid::tokens`].
    pub tokens: usize,
    /// Tiles at most.
    pub max_tiles: usize,
    /// Outputs of the second matrix, or its vectors, where it has another number than the others; 0 without one.
    pub second_width: usize,
    /// See [`Grid::groups`].
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only kernels with matrix instructions read it"))]
    pub groups: usize,
}

/// Of nothing to launch.
#[cfg(feature = "offline")]
pub(super) fn offline_sizes() -> SizesLaunch {
    SizesLaunch::new(1, 1, 1, 1, 1, 1, 1, 1, 1)
}

/// The matrix of a cube, and which cube of those for such matrices it is. Those for a second matrix come first: for a shared
/// expert they have more to do.
#[derive(CubeType)]
pub(crate) struct Part {
    /// Vectors of a row of the matrix.
    pub vectors: usize,
    /// Rows of the matrix; of a gated output, of each half.
    pub outputs: usize,
    /// The number of the cube among its like.
    pub cube: usize,
    /// Whether the matrix is the second one.
    pub is_second: bool,
}

#[cube]
impl Part {
    /// That of cubes with so many outputs each, where there may be a second matrix.
    pub(crate) fn new(
        sizes: &Sizes,
        #[comptime] each: usize,
        #[comptime] second: bool,
        #[comptime] rows: Rows,
    ) -> Part {
        let mut part =
            Part { vectors: sizes.vectors, outputs: sizes.outputs, cube: CUBE_POS, is_second: false.runtime() };
        if comptime!(second) {
            part.split(sizes.second_width, sizes.max_tiles, each, rows);
        }
        part
    }

    /// There is a second matrix, with `width` outputs or vectors in place of the others'.
    fn split(&mut self, width: usize, tiles: usize, #[comptime] each: usize, #[comptime] rows: Rows) {
        let mut outputs = self.outputs;
        if comptime!(rows != Rows::TokenScatter) {
            outputs = width;
        }
        let mut cubes = outputs.div_ceil(each);
        if comptime!(rows == Rows::Dense) {
            cubes *= tiles;
        }
        if CUBE_POS < cubes {
            self.is_second = true;
            self.outputs = outputs;
            if comptime!(rows == Rows::TokenScatter) {
                self.vectors = width;
            }
        } else {
            self.cube = CUBE_POS - cubes;
        }
    }

    /// The row of a single token's shared expert is behind those of its pairs.
    pub(crate) fn place(&self, tile: &mut Tile, pairs: usize) {
        if self.is_second {
            tile.expert = 0;
            tile.first = pairs;
            tile.count = 1;
        }
    }
}

/// Rows that meet the same matrix.
#[derive(CubeType)]
pub(crate) struct Tile {
    pub expert: usize,
    /// In the order of the experts.
    pub first: usize,
    pub count: usize,
    /// Pairs or heads of a token.
    pub per_token: usize,
    #[cube(comptime)]
    rows: Rows,
}

#[cube]
impl Tile {
    /// Without rows past the last tile.
    pub(crate) fn read(
        tiles: &[i32],
        number: usize,
        max_tiles: usize,
        sizes: &Sizes,
        #[comptime] size: usize,
        #[comptime] rows: Rows,
    ) -> Tile {
        let tokens = sizes.tokens;
        let mut expert = 0usize.runtime();
        let mut first = number * size;
        let mut count = 0usize.runtime();
        if comptime!(rows == Rows::Dense) {
            if first < tokens {
                count = min(size, tokens - first);
            }
        } else if comptime!(rows == Rows::Heads) {
            if number < max_tiles {
                let tiles_per_head = tokens.div_ceil(size);
                expert = number / tiles_per_head;
                first = number % tiles_per_head * size;
                count = min(size, tokens - first);
            }
        } else if comptime!(matches!(rows, Rows::TokenGather | Rows::TokenScatter)) {
            first = number;
            if number < max_tiles {
                let chosen = tiles[number];
                if is_row(chosen, tokens) {
                    expert = usize::cast_from(chosen);
                    count = 1usize.runtime();
                }
            }
        } else if number < max_tiles {
            expert = usize::cast_from(tiles[number * TILE]);
            first = usize::cast_from(tiles[number * TILE + 1]);
            count = usize::cast_from(tiles[number * TILE + 2]);
        }
        Tile { expert, first, count, per_token: sizes.per_token, rows }
    }

    /// Tile `number` of those that are listed.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn listed(tiles: &[i32], number: usize, per_token: usize, #[comptime] rows: Rows) -> Tile {
        let mut tile = Tile { expert: 0usize, first: 0usize, count: 0usize, per_token, rows };
        tile.go_to(tiles, number);
        tile
    }

    /// Becomes another one of those that are listed.
    pub(crate) fn go_to(&mut self, tiles: &[i32], number: usize) {
        self.expert = usize::cast_from(tiles[number * TILE]);
        self.first = usize::cast_from(tiles[number * TILE + 1]);
        self.count = usize::cast_from(tiles[number * TILE + 2]);
    }

    /// The row of a single token's pair, if it has one of so many experts.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn take(&mut self, chosen: i32, experts: usize) {
        if is_row(chosen, experts) {
            self.expert = usize::cast_from(chosen);
            self.count = 1usize.runtime();
        }
    }

    /// The row of x for a token of the tile; past the last one, that of the last.
    pub(crate) fn input(&self, order: &[i32], token: usize) -> usize {
        let place = self.first + min(token, self.count - 1);
        if comptime!(self.rows == Rows::Gather) {
            usize::cast_from(order[place]) / self.per_token
        } else if comptime!(self.rows == Rows::TokenGather) {
            0usize.runtime()
        } else if comptime!(self.rows == Rows::Heads) {
            place * self.per_token + self.expert
        } else {
            place
        }
    }

    /// The row of the output for a token of the tile.
    pub(crate) fn output(&self, order: &[i32], token: usize) -> usize {
        let place = self.first + token;
        if comptime!(self.rows == Rows::Scatter) {
            usize::cast_from(order[place])
        } else if comptime!(self.rows == Rows::Heads) {
            place * self.per_token + self.expert
        } else {
            place
        }
    }

    /// The length of a row, with what is carried behind it where rows have that.
    pub(crate) fn row(&self, len: usize, carried: usize) -> usize {
        if comptime!(self.rows == Rows::Heads) { len + carried } else { len }
    }

    /// The row of a token's head.
    pub(crate) fn head_row(&self, token: usize) -> usize {
        (self.first + token) * self.per_token + self.expert
    }

    /// Copies the channels of x past those of the product, `carried` vectors of each token, behind its outputs.
    pub(crate) fn carry<X: Float, E: Float, N: Size>(
        &self,
        x: &[Vector<X, N>],
        out: &mut [E],
        vectors: usize,
        outputs: usize,
        carried: usize,
        #[comptime] units: usize,
    ) {
        let lanes = N::value().comptime();
        let mut vector = UNIT_POS as usize;
        while vector < self.count * carried {
            let (token, column) = (vector / carried, vector % carried);
            let row = self.head_row(token);
            let values = x[row * (vectors + carried) + vectors + column];
            #[unroll]
            for lane in 0..lanes {
                out[row * (outputs + carried * lanes) + outputs + column * lanes + lane] =
                    E::cast_from(values.extract(lane));
            }
            vector += units;
        }
    }
}
