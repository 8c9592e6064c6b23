// CUDA's words for a kernel's source on a CPU: its threads are contexts of one thread, and a warp runs to its next
// shuffle lane by lane, in either order. Of warps there are as many as asked for, one after the other: kernels that
// use shared memory or __syncthreads need more than this.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))

struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim;

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}

static inline unsigned int __float_as_uint(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
static inline float __uint_as_float(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
// With -ffp-contract=off nothing is fused, and the mode of rounding is to nearest even.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }

enum { LANES = 32, STACK_BYTES = 1 << 16 };
static char stacks[LANES][STACK_BYTES];
static ucontext_t host, lanes[LANES];
static bool ended[LANES];
static unsigned int exchanged[LANES];
static int lane;

static void next_lane() { swapcontext(&lanes[lane], &host); }

static unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int distance) {
    if (mask != 0xFFFFFFFFu) abort();
    exchanged[lane] = value;
    next_lane();
    unsigned int found = exchanged[lane ^ distance];
    next_lane();
    return found;
}

typedef void (*Kernel)(const void*, void*, long long, unsigned int, unsigned int, int);

static struct Launch {
    Kernel kernel;
    const void* from;
    void* into;
    long long n;
    unsigned int key_low, key_high;
    int at_random;
} launched;

static void one_thread() {
    Launch& l = launched;
    l.kernel(l.from, l.into, l.n, l.key_low, l.key_high, l.at_random);
    ended[lane] = true;
    swapcontext(&lanes[lane], &host);
}

// 0, or 1 where a lane took no part in a shuffle of the others.
extern "C" int launch(Kernel kernel, unsigned int blocks, unsigned int threads, int backwards, const void* from,
                      void* into, long long n, unsigned int key_low, unsigned int key_high, int at_random) {
    launched = {kernel, from, into, n, key_low, key_high, at_random};
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (unsigned int first = 0; first < threads; first += LANES) {
            for (int i = 0; i < LANES; ++i) {
                getcontext(&lanes[i]);
                lanes[i].uc_stack.ss_sp = stacks[i];
                lanes[i].uc_stack.ss_size = STACK_BYTES;
                lanes[i].uc_link = nullptr;
                ended[i] = false;
                makecontext(&lanes[i], one_thread, 0);
            }
            for (int left = LANES; left;) {
                left = 0;
                for (int i = 0; i < LANES; ++i) {
                    lane = backwards ? LANES - 1 - i : i;
                    threadIdx.x = first + lane;
                    if (!ended[lane]) swapcontext(&host, &lanes[lane]);
                    left += !ended[lane];
                }
                if (left && left < LANES) return 1;
            }
        }
    return 0;
}
