// The codecs of host.py on a GPU: one pass over memory to encode a tensor, one to decode it.
//
//   thread        bf16, fp16: four neighbouring elements; tah4, tah3: 16 in a column of a chunk; else four times four, 32
//                 elements apart. Four are read and written at once where memory is aligned for that, and a
//                 warp reads and writes neighbouring memory
//   8 threads     one block of 128 elements, or one tile; its largest magnitude, or its sums, are found by shuffles
//   wire          bf16, fp16: 2 bytes an element; int8, fp8, int4: | scale of each block ... | codes ... |;
//                 tah4, tah3: see tah.py
//
// The bits are those of numpy, but for the payload of a NaN and the codes of blocks that are not finite, which are 0
// here. So conversions are done on integers, and products, sums and quotients by functions that a compiler may not
// fuse or approximate. CuPy has NVRTC make 0 of what is below the normal numbers (-ftz=true), which counts where such
// an element or result has a code: there ``product`` says in PTX what it means. Nothing is included: NVRTC needs no
// headers, and tests compile the same text for a CPU.
//
// Threads of a block: a multiple of 32. wire begins at a multiple of 4 bytes, x at a multiple of its type's size.

typedef long long Count;
typedef unsigned int Bits;

__device__ __forceinline__ Bits maximum(Bits a, Bits b) { return a > b ? a : b; }

// Rounded to nearest even, whatever the compiler is told of numbers below the normal ones.
__device__ __forceinline__ float product(float a, float b) {
#ifdef __CUDACC_RTC__
    float found;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
    return found;
#else
    return __fmul_rn(a, b);
#endif
}

// --- What tensors are made of: float32 <-> memory, rounded to nearest even.

struct F32 {
    typedef float Memory;
    static __device__ __forceinline__ float within(float x) { return x; }
    static __device__ __forceinline__ Memory to(float x) { return x; }
    static __device__ __forceinline__ float from(Memory x) { return x; }
};

struct Bf16 {
    typedef unsigned short Memory;
    static __device__ __forceinline__ float within(float x) { return x; }
    static __device__ __forceinline__ Memory to(float x) {
        Bits bits = __float_as_uint(x), upper = bits >> 16;
        if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (Memory)(upper | 0x0040u);
        return (Memory)((bits + ((upper & 1u) + 0x7FFFu)) >> 16);
    }
    static __device__ __forceinline__ float from(Memory code) { return __uint_as_float((Bits)code << 16); }
};

struct Fp16 {
    typedef unsigned short Memory;
    // The nearest finite number; NaN stays NaN.
    static __device__ __forceinline__ float within(float x) {
        return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    }
    static __device__ __forceinline__ Memory to(float x) {
        Bits bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu, code;
        if (magnitude > 0x7F800000u) {
            code = 0x7E00u | (magnitude >> 13 & 0x3FFu);
        } else if (magnitude >= 0x477FF000u) {  // 65520
            code = 0x7C00u;
        } else if (magnitude >= 0x38800000u) {  // 2^-14, the least normal number
            code = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
        } else {
            code = (Bits)__float2int_rn(__fmul_rn(__uint_as_float(magnitude), 16777216.0f));  // in steps of 2^-24
        }
        return (Memory)(sign | code);
    }
    static __device__ __forceinline__ float from(Memory code) {
        Bits sign = ((Bits)code & 0x8000u) << 16, exponent = code >> 10 & 0x1Fu, rest = ((Bits)code & 0x7FFFu) << 13;
        if (exponent == 0) rest = __float_as_uint(__fmul_rn((float)(code & 0x3FFu), 5.9604644775390625e-8f));
        else rest += (exponent == 31 ? 224u : 112u) << 23;
        return __uint_as_float(sign | rest);
    }
};

// --- What blocks are scaled to: an element in steps of its block's scale <-> its code.

struct Int8 {
    enum { WIDTH = 8, AT_RANDOM = 1 };
    static __device__ __forceinline__ float most() { return 127.0f; }
    static __device__ __forceinline__ float least() { return __uint_as_float(0x04000000u); }       // 2^-119
    static __device__ __forceinline__ float most_scale() { return __uint_as_float(0x7C010203u); }  // see host.Levels
    static __device__ __forceinline__ Bits code(float steps) { return (Bits)__float2int_rn(steps) & 0xFFu; }
    static __device__ __forceinline__ float steps(Bits code) { return (float)(signed char)code; }
};

struct Int4 {
    enum { WIDTH = 4, AT_RANDOM = 1 };
    static __device__ __forceinline__ float most() { return 7.0f; }
    static __device__ __forceinline__ float least() { return __uint_as_float(0x02000000u); }  // 2^-123
    static __device__ __forceinline__ float most_scale() { return __uint_as_float(0x7E124923u); }
    static __device__ __forceinline__ Bits code(float steps) { return (Bits)__float2int_rn(steps) & 0xFu; }
    static __device__ __forceinline__ float steps(Bits code) { return (float)((int)(code << 28) >> 28); }
};

struct Fp8 {  // E4M3
    enum { WIDTH = 8, AT_RANDOM = 0 };
    static __device__ __forceinline__ float most() { return 448.0f; }
    static __device__ __forceinline__ float least() { return __uint_as_float(0x05000000u); }  // 2^-117
    static __device__ __forceinline__ float most_scale() { return __uint_as_float(0x7B124923u); }
    static __device__ __forceinline__ Bits code(float steps) {
        Bits bits = __float_as_uint(steps), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
        if (magnitude >= 0x3C800000u)  // 2^-6, the least normal number
            return sign | ((magnitude + (0x7FFFFu + (magnitude >> 20 & 1u))) >> 20) - (120u << 3);
        return sign | (Bits)__float2int_rn(__fmul_rn(__uint_as_float(magnitude), 512.0f));
    }
    static __device__ __forceinline__ float steps(Bits code) {
        Bits sign = (code & 0x80u) << 24, magnitude = code & 0x7Fu, bits;
        if (magnitude == 0x7Fu) bits = 0x7FC00000u;
        else if (magnitude < 8) bits = __float_as_uint(__fmul_rn((float)magnitude, 0.001953125f));
        else bits = (magnitude << 20) + (120u << 23);
        return __uint_as_float(sign | bits);
    }
};

// --- Four neighbours in memory. Of the last ones some may be missing: they are read as 0 and not written.

__device__ __forceinline__ bool aligned(const void* memory, Count bytes) { return (Count)memory % bytes == 0; }

__device__ __forceinline__ void read4(const float* x, Count i, Count n, float* found) {
    if (i + 4 <= n && aligned(x, 16)) {
        float4 four = *(const float4*)(x + i);
        found[0] = four.x, found[1] = four.y, found[2] = four.z, found[3] = four.w;
        return;
    }
    for (int k = 0; k < 4; ++k) found[k] = i + k < n ? x[i + k] : 0.0f;
}

__device__ __forceinline__ void read4(const unsigned short* x, Count i, Count n, unsigned short* found) {
    if (i + 4 <= n && aligned(x, 8)) {
        ushort4 four = *(const ushort4*)(x + i);
        found[0] = four.x, found[1] = four.y, found[2] = four.z, found[3] = four.w;
        return;
    }
    for (int k = 0; k < 4; ++k) found[k] = i + k < n ? x[i + k] : (unsigned short)0;
}

__device__ __forceinline__ void write4(float* x, Count i, Count n, const float* given) {
    if (i + 4 <= n && aligned(x, 16)) {
        *(float4*)(x + i) = make_float4(given[0], given[1], given[2], given[3]);
        return;
    }
    for (int k = 0; k < 4 && i + k < n; ++k) x[i + k] = given[k];
}

__device__ __forceinline__ void write4(unsigned short* x, Count i, Count n, const unsigned short* given) {
    if (i + 4 <= n && aligned(x, 8)) {
        *(ushort4*)(x + i) = make_ushort4(given[0], given[1], given[2], given[3]);
        return;
    }
    for (int k = 0; k < 4 && i + k < n; ++k) x[i + k] = given[k];
}

// Four codes of 8 or 4 bits are one word of 32 or 16, the first of them in the lowest bits.

template <class Code> __device__ __forceinline__ void write_codes(unsigned char* codes, Count i, Count n, Bits word) {
    Count begin = i * Code::WIDTH / 8;
    if (i + 4 <= n) {
        if (Code::WIDTH == 8) *(Bits*)(codes + begin) = word;
        else *(unsigned short*)(codes + begin) = (unsigned short)word;
        return;
    }
    for (Count at = begin; at < (n * Code::WIDTH + 7) / 8; ++at, word >>= 8) codes[at] = (unsigned char)word;
}

template <class Code> __device__ __forceinline__ Bits read_codes(const unsigned char* codes, Count i, Count n) {
    Count begin = i * Code::WIDTH / 8;
    if (i + 4 <= n) return Code::WIDTH == 8 ? *(const Bits*)(codes + begin) : *(const unsigned short*)(codes + begin);
    Bits word = 0;
    for (Count at = begin; at < (n * Code::WIDTH + 7) / 8; ++at) word |= (Bits)codes[at] << 8 * (at - begin);
    return word;
}

__device__ __forceinline__ Count first_of_thread() {
    return 4 * ((Count)blockIdx.x * blockDim.x + threadIdx.x);
}

// The two int16 of host.draws for positions 2 * pair and 2 * pair + 1, in steps.
__device__ __forceinline__ void draw2(Bits pair, Bits key_low, Bits key_high, float* found) {
    Bits bits = pair * 0x9E3779B1u + key_low;
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= key_high;
    bits ^= bits >> 15;
    bits *= 0x846CA68Bu;
    bits ^= bits >> 16;
    bits |= 0x00010001u;
    found[0] = __fmul_rn((float)(short)(bits & 0xFFFFu), 1.52587890625e-5f);
    found[1] = __fmul_rn((float)(short)(bits >> 16), 1.52587890625e-5f);
}

// --- bf16 and fp16, of float32.

template <class Half> __device__ __forceinline__ void encode_half(const float* x, unsigned short* wire, Count n) {
    Count i = first_of_thread();
    if (i >= n) return;
    float four[4];
    unsigned short codes[4];
    read4(x, i, n, four);
    for (int k = 0; k < 4; ++k) codes[k] = Half::to(four[k]);
    write4(wire, i, n, codes);
}

template <class Half> __device__ __forceinline__ void decode_half(const unsigned short* wire, float* x, Count n) {
    Count i = first_of_thread();
    if (i >= n) return;
    unsigned short codes[4];
    float four[4];
    read4(wire, i, n, codes);
    for (int k = 0; k < 4; ++k) four[k] = Half::from(codes[k]);
    write4(x, i, n, four);
}

// --- int8, fp8 and int4, of float32, fp16 and bf16.

enum { BLOCK = 128, PER_BLOCK = 8, QUADS = BLOCK / PER_BLOCK / 4 };  // elements, threads, and fours of a thread

struct Place {  // of a thread
    Count block, first;  // of the tensor; of the thread's first four elements, the next ones follow in STEP
};
enum { STEP = 4 * PER_BLOCK };

__device__ __forceinline__ Place place_of_thread() {
    Count thread = (Count)blockIdx.x * blockDim.x + threadIdx.x, block = thread / PER_BLOCK;
    return {block, block * BLOCK + thread % PER_BLOCK * 4};
}

template <class Type, class Code>
__device__ __forceinline__ void encode_blocks(
    const typename Type::Memory* x, unsigned char* wire, Count n, Bits key_low, Bits key_high, int at_random) {
    Place place = place_of_thread();
    typename Type::Memory memory[4 * QUADS];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) read4(x, place.first + quad * STEP, n, memory + 4 * quad);
    float found[4 * QUADS];
    Bits magnitude = 0;  // of a float as of its bits; NaN is above infinity
    for (int k = 0; k < 4 * QUADS; ++k) {
        found[k] = Type::from(memory[k]);
        magnitude = maximum(magnitude, __float_as_uint(found[k]) & 0x7FFFFFFFu);
    }
    for (int distance = PER_BLOCK / 2; distance; distance >>= 1)
        magnitude = maximum(magnitude, __shfl_xor_sync(0xFFFFFFFFu, magnitude, distance));
    if (place.first >= n) return;
    bool finite = magnitude < 0x7F800000u;
    float largest = __uint_as_float(magnitude), scale = __uint_as_float(0x7FC00000u), inverse = 0.0f;
    if (finite) {
        scale = __fdiv_rn(largest, Code::most());
        if (scale > Code::most_scale()) scale = Code::most_scale();
        if (largest < Code::least()) scale = 0.0f;
        inverse = __fdiv_rn(Code::most(), largest < Code::least() ? Code::least() : largest);
    }
    if (threadIdx.x % PER_BLOCK == 0) ((float*)wire)[place.block] = scale;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        Count i = place.first + quad * STEP;
        if (i >= n) return;
        Bits word = 0;
        if (finite) {
            float drawn[4];
            if (Code::AT_RANDOM && at_random) {
                draw2((Bits)(i / 2), key_low, key_high, drawn);
                draw2((Bits)(i / 2 + 1), key_low, key_high, drawn + 2);
            }
            for (int k = 0; k < 4; ++k) {
                float steps = product(found[4 * quad + k], inverse);
                if (Code::AT_RANDOM && at_random) steps = __fadd_rn(steps, i + k < n ? drawn[k] : 0.0f);
                word |= Code::code(steps) << Code::WIDTH * k;
            }
        }
        write_codes<Code>(wire + (n + BLOCK - 1) / BLOCK * 4, i, n, word);
    }
}

template <class Type, class Code>
__device__ __forceinline__ void decode_blocks(const unsigned char* wire, typename Type::Memory* x, Count n) {
    Place place = place_of_thread();
    if (place.first >= n) return;
    float scale = ((const float*)wire)[place.block];
    const unsigned char* codes = wire + (n + BLOCK - 1) / BLOCK * 4;
    Bits words[QUADS], mask = (1u << Code::WIDTH) - 1u;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) words[quad] = read_codes<Code>(codes, place.first + quad * STEP, n);
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        typename Type::Memory memory[4];
        for (int k = 0; k < 4; ++k)
            memory[k] = Type::to(product(Code::steps(words[quad] >> Code::WIDTH * k & mask), scale));
        write4(x, place.first + quad * STEP, n, memory);
    }
}

// --- tah4 and tah3, of float32, fp16 and bf16: see tah.py. A warp has four tiles, and a thread a group of 16 rows of one.

enum { TILE = 128, TILES_OF_CHUNK = 128, GROUP = 16, TILES_OF_WARP = 4, WARP = 32 };

template <int LOW_BITS_, int UNITS_> struct Tah {
    enum {
        LOW_BITS = LOW_BITS_, UNITS = UNITS_, WORDS = UNITS / 32, WIDTH = LOW_BITS + 2, PER_BYTE = 8 / WIDTH,
        BYTES_OF_GROUP = GROUP / PER_BYTE, CODE_BYTES = TILE / PER_BYTE,
    };
};
typedef Tah<2, 96> Tah4;
typedef Tah<0, 192> Tah3;

struct Group {
    Count tile, tiles, first;  // number of the tile; tiles of the tensor; the group's first element
    int number, columns;       // of the group in its tile; distance of its elements
};

__device__ __forceinline__ Group group_of_thread(Count n) {
    Count tiles = (n + TILE - 1) / TILE, warp = ((Count)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    Count tile = warp * TILES_OF_WARP + threadIdx.x % TILES_OF_WARP, column = tile % TILES_OF_CHUNK;
    int columns = TILES_OF_CHUNK, number = threadIdx.x % WARP / TILES_OF_WARP;
    if (tiles - (tile - column) < columns) columns = (int)(tiles - (tile - column));
    return {tile, tiles, (tile - column) * TILE + column + (Count)number * GROUP * columns, number, columns};
}

// Its parts on the wire: the tile's units and scale; its own codes, which are ``columns`` bytes apart.
template <class Form> __device__ __forceinline__ Bits* units_on_wire(unsigned char* wire, Group group) {
    return (Bits*)wire + group.tile * Form::WORDS;
}
template <class Form> __device__ __forceinline__ unsigned short* scale_on_wire(unsigned char* wire, Group group) {
    return (unsigned short*)(wire + group.tiles * Form::WORDS * 4) + group.tile;
}
template <class Form> __device__ __forceinline__ unsigned char* codes_on_wire(unsigned char* wire, Group group) {
    Count column = group.tile % TILES_OF_CHUNK;
    wire += group.tiles * (Form::WORDS * 4 + 2) + (group.tile - column) * Form::CODE_BYTES + column;
    return wire + group.number * Form::BYTES_OF_GROUP * group.columns;
}

__device__ __forceinline__ Bits of_other_group(Bits mine, int groups) {
    return __shfl_xor_sync(0xFFFFFFFFu, mine, groups * TILES_OF_WARP);
}

__device__ __forceinline__ Bits sum_of_tile(Bits of_group) {
    for (int groups = TILE / GROUP / 2; groups; groups >>= 1) of_group += of_other_group(of_group, groups);
    return of_group;
}

// The sum of the groups before this one; of_group becomes that of all.
__device__ __forceinline__ Bits sum_before(Bits& of_group, int number) {
    Bits before = 0;
    for (int groups = 1; groups < TILE / GROUP; groups *= 2) {
        Bits other = of_other_group(of_group, groups);
        if (number & groups) before += other;
        of_group += other;
    }
    return before;
}

__device__ __forceinline__ float magnitude_of(float x) { return __uint_as_float(__float_as_uint(x) & 0x7FFFFFFFu); }
__device__ __forceinline__ float added(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ int added(int a, int b) { return a + b; }

// The Hadamard matrix times a group.
template <class Number> __device__ __forceinline__ void transform(Number* y) {
#pragma unroll
    for (int distance = 1; distance < GROUP; distance *= 2)
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (!(i & distance)) {
                Number a = y[i], b = y[i + distance];
                y[i] = added(a, b);
                y[i + distance] = added(a, -b);
            }
}

// The tile's sum of magnitudes, halves of groups first and then halves of the tile, as tah._total.
__device__ __forceinline__ float total(const float* y) {
    float sums[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) sums[i] = magnitude_of(y[i]);
#pragma unroll
    for (int half = GROUP / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i)
            if (i < half) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    for (int groups = TILE / GROUP / 2; groups; groups >>= 1)
        sums[0] = __fadd_rn(sums[0], __uint_as_float(of_other_group(__float_as_uint(sums[0]), groups)));
    return sums[0];
}

__device__ __forceinline__ float rounded_up(float x) {  // to bfloat16
    return __uint_as_float((__float_as_uint(x) + 0xFFFFu) & 0xFFFF0000u);
}

__device__ __forceinline__ float edge() { return 0.000244140625f; }  // 2^-12

// Units of the tile's elements, as if none were negative.
template <class Form> __device__ __forceinline__ Bits count_units(const float* y, float inverse) {
    Bits units = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        float cells = __fadd_rn(product(magnitude_of(y[i]), inverse), edge() / (1 << Form::LOW_BITS));
        units += (Bits)__float2int_rd(cells);
    }
    return sum_of_tile(units);
}

template <class Type, class Form>
__device__ __forceinline__ void encode_tiles(const typename Type::Memory* x, unsigned char* wire, Count n) {
    Group group = group_of_thread(n);
    float y[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        Count at = group.first + (Count)i * group.columns;
        y[i] = group.tile < group.tiles && at < n ? Type::from(x[at]) : 0.0f;
    }
    transform(y);
    float sum = total(y), scale = 0.0f, inverse = 0.0f;
    bool too_large = !(sum < __uint_as_float(0x77800000u));          // 2^112; or not finite
    bool coded = !too_large && sum >= __uint_as_float(0x23000000u);  // 2^-57
    if (!coded) {
        for (int i = 0; i < GROUP; ++i) y[i] = 0.0f;
        sum = 1.0f;
    }
    float unit = rounded_up(__fdiv_rn(sum, Form::UNITS + 59.0f)), of_one = __fdiv_rn(1.0f, unit);
    float surplus = __fadd_rn(__fmul_rn(sum, of_one), -(float)count_units<Form>(y, of_one)), growth = 1.015625f;
    unit = rounded_up(__fdiv_rn(sum, __fadd_rn(surplus, Form::UNITS - 1.0f)));
    for (Bits any = 1; any; growth = __fadd_rn(growth, __fadd_rn(growth, -1.0f))) {
        any = count_units<Form>(y, __fdiv_rn(1.0f, unit)) > Form::UNITS;
        if (any) unit = rounded_up(__fmul_rn(unit, growth));
        for (int distance = WARP / 2; distance; distance >>= 1) any |= __shfl_xor_sync(0xFFFFFFFFu, any, distance);
    }
    if (coded) {
        scale = __fmul_rn(unit, 1.0f / (32 << Form::LOW_BITS));
        inverse = __fdiv_rn((float)(1 << Form::LOW_BITS), unit);
    }
    Bits codes[GROUP], units[GROUP], all = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        int cell = __float2int_rd(__fadd_rn(product(y[i], inverse), edge()));
        Bits negative = cell < 0, magnitude = (Bits)(negative ? ~cell : cell);
        units[i] = magnitude >> Form::LOW_BITS;
        codes[i] = (magnitude & ((1u << Form::LOW_BITS) - 1u)) |
                   ((Bits)(units[i] > 0) | negative << 1) << Form::LOW_BITS;
        all += units[i];
    }
    Bits used = sum_before(all, group.number), words[Form::WORDS] = {};
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        used += units[i];
#pragma unroll
        for (int word = 0; word < Form::WORDS; ++word)
            if (units[i] && (used - 1) / 32 == word) words[word] |= 1u << (used - 1) % 32;
    }
#pragma unroll
    for (int word = 0; word < Form::WORDS; ++word)
        for (int groups = TILE / GROUP / 2; groups; groups >>= 1) words[word] |= of_other_group(words[word], groups);
    if (group.tile >= group.tiles) return;
    unsigned char* bytes = codes_on_wire<Form>(wire, group);
#pragma unroll
    for (int at = 0; at < Form::BYTES_OF_GROUP; ++at) {
        Bits byte = 0;
        for (int k = 0; k < Form::PER_BYTE; ++k) byte |= codes[at * Form::PER_BYTE + k] << Form::WIDTH * k;
        bytes[(Count)at * group.columns] = (unsigned char)byte;
    }
    if (group.number) return;
    *scale_on_wire<Form>(wire, group) = too_large ? 0x7FC0 : (unsigned short)(__float_as_uint(scale) >> 16);
#pragma unroll
    for (int word = 0; word < Form::WORDS; ++word) units_on_wire<Form>(wire, group)[word] = words[word];
}

template <class Type, class Form>
__device__ __forceinline__ void decode_tiles(const unsigned char* sent, typename Type::Memory* x, Count n) {
    Group group = group_of_thread(n);
    unsigned char* wire = (unsigned char*)sent;
    bool is_there = group.tile < group.tiles;
    Bits bytes[Form::BYTES_OF_GROUP], elements = 0, marks = 0;
#pragma unroll
    for (int at = 0; at < Form::BYTES_OF_GROUP; ++at) {
        bytes[at] = is_there ? codes_on_wire<Form>(wire, group)[(Count)at * group.columns] : 0;
        for (int k = 0; k < Form::PER_BYTE; ++k) elements += bytes[at] >> (Form::WIDTH * k + Form::LOW_BITS) & 1u;
    }
    Bits skipped = sum_before(elements, group.number);
    if (!is_there) return;
    const Bits* words = units_on_wire<Form>(wire, group);
    for (int word = 0; word < Form::WORDS; ++word) marks += (Bits)__popc(words[word]);
    bool fits = marks == elements;  // else they count as none
    int word = 0, before = -1;
    Bits left = words[0];
    for (; fits && skipped; --skipped) {
        while (!left) left = words[++word];
        before = 32 * word + __ffs((int)left) - 1;
        left &= left - 1;
    }
    int y[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        Bits code = bytes[i / Form::PER_BYTE] >> Form::WIDTH * (i % Form::PER_BYTE), units = 0;
        if (fits && (code >> Form::LOW_BITS & 1u)) {
            while (!left) left = words[++word];
            int place = 32 * word + __ffs((int)left) - 1;
            left &= left - 1;
            units = (Bits)(place - before);
            before = place;
        }
        int odd = (int)((units << Form::LOW_BITS | (code & ((1u << Form::LOW_BITS) - 1u))) << 1 | 1u);
        y[i] = code >> (Form::LOW_BITS + 1) & 1u ? -odd : odd;
    }
    transform(y);
    float scale = __uint_as_float((Bits)*scale_on_wire<Form>(wire, group) << 16);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        Count at = group.first + (Count)i * group.columns;
        if (at < n) x[at] = Type::to(Type::within(product((float)y[i], scale)));
    }
}

// --- The kernels, named after codec and type. Those that have no use for a key take it all the same.

#define HALF(name, Half)                                                                                    \
    extern "C" __global__ void encode_##name##_f32(                                                         \
        const float* x, unsigned short* wire, Count n, Bits key_low, Bits key_high, int at_random) {        \
        encode_half<Half>(x, wire, n);                                                                      \
    }                                                                                                       \
    extern "C" __global__ void decode_##name##_f32(const unsigned short* wire, float* x, Count n) {         \
        decode_half<Half>(wire, x, n);                                                                      \
    }

#define BLOCKS(name, Code, type, Type)                                                                      \
    extern "C" __global__ void encode_##name##_##type(                                                      \
        const Type::Memory* x, unsigned char* wire, Count n, Bits key_low, Bits key_high, int at_random) {  \
        encode_blocks<Type, Code>(x, wire, n, key_low, key_high, at_random);                                \
    }                                                                                                       \
    extern "C" __global__ void decode_##name##_##type(                                                      \
        const unsigned char* wire, Type::Memory* x, Count n) {                                              \
        decode_blocks<Type, Code>(wire, x, n);                                                              \
    }

#define TILES(name, Form, type, Type)                                                                       \
    extern "C" __global__ void encode_##name##_##type(                                                      \
        const Type::Memory* x, unsigned char* wire, Count n, Bits key_low, Bits key_high, int at_random) {  \
        encode_tiles<Type, Form>(x, wire, n);                                                               \
    }                                                                                                       \
    extern "C" __global__ void decode_##name##_##type(                                                      \
        const unsigned char* wire, Type::Memory* x, Count n) {                                              \
        decode_tiles<Type, Form>(wire, x, n);                                                               \
    }

#define OF_ALL(WAYS, name, Code)  \
    WAYS(name, Code, f32, F32)    \
    WAYS(name, Code, f16, Fp16)   \
    WAYS(name, Code, bf16, Bf16)

HALF(bf16, Bf16)
HALF(fp16, Fp16)
OF_ALL(BLOCKS, int8, Int8)
OF_ALL(BLOCKS, fp8, Fp8)
OF_ALL(BLOCKS, int4, Int4)
OF_ALL(TILES, tah4, Tah4)
OF_ALL(TILES, tah3, Tah3)
