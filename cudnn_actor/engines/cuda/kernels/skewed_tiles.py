"""Tiles of matrices whose rows begin at addresses that are multiples of a few bytes only.

Memory is read in chunks and written in sectors, all of them whole and aligned. To write a part
of a sector costs more than to write all of it. So a column of a tile, which is a part of a row
of the result, begins at a sector, up to a sector before the tile's first row. So some rows are
read by two blocks. The chunks of a row contain elements before and behind the tile, too, which
are not used.

A row's place in shared memory is its place in memory, modulo a chunk, because the pitch is the
operand's stride, modulo a chunk. So asynchronous copies move chunks as they are, and a place is
linear in the row and in the column. A warp writes 32 words of a column at once.
"""

from __future__ import annotations

import math

import msgspec

from cudnn_actor.engines.cuda.kernels.index_code import division
from cudnn_actor.engines.cuda.kernels.kernel import THREADS, WARP, power_of_two

__all__ = ["COPY", "Skewed", "describe_skewed"]

_TILES = {1: (128, 256), 2: (128, 128), 4: (128, 64), 8: (64, 64)}
"""The most rows and columns of a tile, by the bytes of an element.

Rows are the operand's, and fill words of a warp. The taller tiles are, the smaller is the share of rows that
two blocks read; the wider they are, the smaller is the share of sectors that two blocks read. A tile takes up
to 48 KiB of shared memory.
"""
_BLOCKS = 5
"""The most blocks of a multiprocessor at once, which has 227 KiB of shared memory."""
_SECTOR = 32
"""Bytes at whose multiples a tile's part of a row of the result begins."""
_CHUNK, _WORD = 16, 4
"""The most bytes that a thread reads at once, and the bytes that it writes at once, unless an element is
larger."""
_MOST_UNROLLED = 16
"""The most chunks that a thread asks for at once: there are no registers for more."""
_UNROLLED = 4
"""The columns of a tile that a warp writes at once."""
_FETCHED = ".L2::128B"
"""The suffix of a copy with which the L2 cache also reads the rest of the 128 bytes around a chunk."""
_MOST_CONFLICTS = 2
"""The most lanes of a warp that may need the same bank of shared memory."""


class Skewed(msgspec.Struct, frozen=True):
    """How a matrix is cut into skewed tiles; sizes are in elements.

    Parameters
    ----------
    itemsize
        Bytes of an element.
    rows, columns
        The rows and columns of a tile that are written.
    step
        The operand's stride from row to row.
    chunk
        The elements that are read at once.
    """

    itemsize: int
    rows: int
    columns: int
    step: int
    chunk: int

    @property
    def word(self) -> int:
        """Elements that a lane writes at once."""
        return max(_WORD // self.itemsize, 1)

    @property
    def sector(self) -> int:
        """Elements of a sector."""
        return _SECTOR // self.itemsize

    @property
    def rows_read(self) -> int:
        """Rows that a tile reads."""
        return self.rows + self.sector - 1

    @property
    def turns(self) -> int:
        """The number of chunks of a thread, those with no row of the tile included."""
        return -(-self.rows_read * self.chunks // THREADS)

    @property
    def rows_behind(self) -> int:
        """A bound of how far behind the matrix' last row the rows are whose places a thread computes."""
        return -(-self.turns * THREADS // self.chunks)

    @property
    def chunks(self) -> int:
        """The most chunks that contain elements of one row of a tile."""
        return self.columns // self.chunk + 1

    @property
    def pitch(self) -> int:
        """Elements from row to row in shared memory."""
        least = self.chunks * self.chunk  # no chunk has elements of two rows, since the columns fill chunks
        return least + (self.step - least) % self.chunk

    @property
    def shared_elements(self) -> int:
        """Elements of shared memory."""
        return self.rows_read * self.pitch + self.chunk

    @property
    def resident(self) -> int:
        """The number of blocks that are to run on a multiprocessor at once."""
        return _BLOCKS

    @property
    def conflicts(self) -> int:
        """The number of lanes that need the same bank when a warp reads a column from shared memory."""
        return math.gcd(self.pitch, WARP if self.itemsize <= _WORD else WARP // 2)

    def blocks_along(self, rows: int) -> int:
        """The number of tiles along `rows` rows. The first tile may begin up to one sector early."""
        return -(-(rows + self.sector - 1) // self.rows)

    def body(self) -> str:
        """The C++ that moves a block's tile, for `tiled_source`."""
        chunk, chunks = self.chunk * self.itemsize, self.chunks
        bits = 8 * self.itemsize % 64
        return f"""constexpr int SECTOR = {self.sector}, CHUNK = {self.chunk}, PITCH = {self.pitch};
        const int shift = (int)((from_at + (unsigned)(x + x_of(row - (SECTOR - 1)))) & (CHUNK - 1));
        #pragma unroll {min(self.turns, _MOST_UNROLLED)}
        for (int k = 0; k < {self.turns}; ++k) {{
            const int p = (int)thread + k * {THREADS};
            int r = p;
            {division("c", "r", str(chunks), "CHUNK", "int")}
            const I number = row - (SECTOR - 1) + r, place = x + x_of(number);
            const int before = (int)((from_at + (unsigned)place) & (CHUNK - 1));
            if (p < {self.rows_read * chunks} && (U)number < (U)rows && c - before < beside)
                copy<{chunk}>(tile + (shift + r * PITCH - before + c), from + (place - before + c));
        }}
        wait();
        __syncthreads();
        const auto write = [&](int c, bool whole) {{
            const I begin = z + z_of(column + c);
            const int before = (int)((y_at + (unsigned)begin) & (SECTOR - 1));
            const E* const stored = tile + (shift + ((int)lane * WORD + SECTOR - 1 - before) * PITCH + c);
            E* const into = y + (begin - before + (int)lane * WORD);
            const I start = row - before + (int)lane * WORD;
            #pragma unroll
            for (int r = 0; r < ROWS; r += {WARP} * WORD) {{
                if (whole || (U)(start + r) <= (U)((I)rows - WORD)) {{
                    Bits bits = 0;
                    #pragma unroll
                    for (int v = 0; v < WORD; ++v) bits |= (Bits)stored[(r + v) * PITCH] << v * {bits};
                    *(Bits*)(into + r) = bits;
                }} else {{
                    for (int v = 0; v < WORD; ++v)
                        if ((U)(start + r + v) < (U)rows) into[r + v] = stored[(r + v) * PITCH];
                }}
            }}
        }};
        constexpr int WARPS = {THREADS // WARP};
        if (row >= SECTOR - 1 && row + ROWS <= (I)rows) {{
            // This `write` has no branch, so a warp reads several columns from shared memory at once.
            #pragma unroll {_UNROLLED}
            for (int c = (int)warp; c < beside; c += WARPS) write(c, true);
        }} else {{
            #pragma unroll 1
            for (int c = (int)warp; c < beside; c += WARPS) write(c, false);
        }}"""


def describe_skewed(itemsize: int, rows: int, columns: int, step: int) -> Skewed | None:
    """Describe skewed tiles; None if a matrix is too small, or too many lanes would need the same bank."""
    most_rows, most_columns = _TILES[itemsize]
    written = WARP * max(_WORD // itemsize, 1)  # by a warp at once
    if rows < written // 2 or columns < 2 * _SECTOR // itemsize:
        return None
    found = [
        Skewed(
            itemsize=itemsize,
            rows=min(most_rows, -(-rows // written) * written),
            columns=min(most_columns, power_of_two(columns)),
            step=step,
            chunk=nbytes // itemsize,
        )
        for nbytes in (16, 8, 4)
        if itemsize <= nbytes <= _CHUNK
    ]
    return next((each for each in found if each.conflicts <= _MOST_CONFLICTS), None)


COPY = f"""
template <int N> struct alignas(N) Chunk {{ unsigned of[N / 4]; }};
// An asynchronous copy: all threads may read it after `wait` and a barrier.
template <int N> __device__ __forceinline__ void copy(void* to, const void* from) {{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if constexpr (N == 16)
        asm volatile("cp.async.cg.shared.global{_FETCHED} [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global{_FETCHED} [%0], [%1], %2;"
                     :: "r"(at), "l"(from), "n"(N) : "memory");
#else
    *(Chunk<N>*)to = *(const Chunk<N>*)from;
#endif
}}
__device__ __forceinline__ void wait() {{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}}
"""
"""C++ before a kernel of skewed tiles: the functions that it calls."""
