/* Loops of a training step on a CPU that torch would need several passes for. ``cpu_library.py`` compiles and calls
   them; what each computes is stated, and tested, beside its caller in Python.

   Additions, products, fused multiply-adds, quotients and roots are rounded as IEEE 754 says, and the compiler must not
   join or reorder them. So an element has the same bits wherever it lies, and on every processor and compiler. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || !(defined(__FMA__) || defined(__ARM_FEATURE_FMA))
#error "expected a processor with fused multiply-add, and a compiler that keeps the order of operations"
#endif

#if defined(_OPENMP) && defined(__clang__)
#error "expected a compiler that calls GNU's OpenMP, torch's own: another one would compete with it for the cores"
#endif

#define BLOCK 256                   /* elements of a block: a few full vectors */
#define WORTH_WAKING(elements) (threads > 1 && (elements) > 1 << 13) /* else other threads sleep on */
#define COLUMNS 1024                /* float64 sums that stay in the first cache */
#define RARE (1LL << 47)            /* tails of bits below this need more bits; as ``_WIDE_RARE`` in normal.py */
#define MARKED_NAN (0xfffaLL << 47) /* of a rare value; as ``_MARK`` in normal.py */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- weighted sums: out_n = sum_b factor_b G_bn, in float64; see keep_cpu.py -------------------------------------- */

static void sum_columns(const float *G, const double *factors, double *out, int64_t rows, int64_t stride, int64_t n)
{
    double total[COLUMNS] = {0};
    for (int64_t b = 0; b < rows; b++) {
        const float *row = G + b * stride;
        for (int64_t i = 0; i < n; i++) total[i] = fma(factors[b], (double)row[i], total[i]);
    }
    memcpy(out, total, n * sizeof(double));
}

void weighted_sum(const float *G, const double *factors, double *out, int64_t rows, int64_t columns, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (WORTH_WAKING(rows * columns))
    for (int64_t first = 0; first < columns; first += COLUMNS)
        sum_columns(G + first, factors, out + first, rows, columns, smaller(COLUMNS, columns - first));
}

/* ---- GELU and its slope; see fdp/cpu/gelu.py ----------------------------------------------------------------------- */

static inline float exponential(float x)
{
    /* 2^n e^r with |r| <= log(2) / 2; a polynomial of degree 6 for e^r, to 1e-7 of it. */
    x = x < -87.0f ? -87.0f : x > 89.0f ? 89.0f : x; /* e^89 is infinity here */
    float shifted = fmaf(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
    float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    float p = 0.00138888889f;
    p = fmaf(p, r, 0.00833333333f);
    p = fmaf(p, r, 0.0416666667f);
    p = fmaf(p, r, 0.166666667f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static void gelu_block(const float *x, float *y, float *slope, int64_t n, float linear, float cubic, float most)
{
    for (int64_t i = 0; i < n; i++) {
        float near = x[i] < -most ? -most : x[i] > most ? most : x[i], square = near * near;
        float s = 1.0f / (1.0f + exponential(-near * fmaf(cubic, square, linear)));
        y[i] = x[i] * s;
        slope[i] = fmaf(near * fmaf(3.0f * cubic, square, linear), s * (1.0f - s), s);
    }
}

void gelu_and_slope(const float *x, float *y, float *slope, int64_t size, float linear, float cubic, float most,
                    int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (WORTH_WAKING(size))
    for (int64_t first = 0; first < size; first += COLUMNS)
        gelu_block(x + first, y + first, slope + first, smaller(COLUMNS, size - first), linear, cubic, most);
}

/* ---- layer norm, scale and bias of each sample's own; see fdp/cpu/layer_norm.py ------------------------------------ */

#define ROW_LANES 16
#define CHUNK 32 /* tokens whose products are added one after the other; the sums of chunks are added after that */

typedef float row_lanes __attribute__((vector_size(4 * ROW_LANES)));

static inline row_lanes load(const float *x)
{
    row_lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void store(float *x, row_lanes v) { memcpy(x, &v, sizeof v); }

static inline float sum_lanes(row_lanes v)
{
    for (int half = ROW_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

static void normalise_row(const float *x, const float *weight, const float *bias, float *y, float *moments,
                          int64_t width, float eps)
{
    int64_t whole = width - width % ROW_LANES, i;
    row_lanes sums = {0}, squares = {0};
    for (i = 0; i < whole; i += ROW_LANES) sums += load(x + i);
    float sum = sum_lanes(sums);
    for (; i < width; i++) sum += x[i];
    float mean = sum / (float)width;
    row_lanes offs = {0}; /* what the first sum has lost is in the sum of the differences from its mean */
    for (i = 0; i < whole; i += ROW_LANES) {
        row_lanes off = load(x + i) - mean;
        offs += off;
        squares += off * off;
    }
    float lost = sum_lanes(offs), square = sum_lanes(squares);
    for (; i < width; i++) {
        lost += x[i] - mean;
        square += (x[i] - mean) * (x[i] - mean);
    }
    lost /= (float)width;
    mean += lost;
    float variance = square / (float)width - lost * lost;
    float rise = 1.0f / sqrtf((variance > 0.0f ? variance : square * 0.0f) + eps);
    moments[0] = mean;
    moments[1] = rise;
    for (i = 0; i < width; i++) y[i] = fmaf((x[i] - mean) * rise, weight[i], bias[i]);
}

void layer_norm(const float *x, const float *weights, const float *biases, float *y, float *moments, int64_t samples,
                int64_t tokens, int64_t width, float eps, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (WORTH_WAKING(samples * tokens * width))
    for (int64_t row = 0; row < samples * tokens; row++) {
        int64_t own = row / tokens * width;
        normalise_row(x + row * width, weights + own, biases + own, y + row * width, moments + 2 * row, width, eps);
    }
}

static void pull_back_row(const float *g, const float *x, const float *weight, const float *moments, float *of_x,
                          float *of_weight, float *of_bias, int64_t width)
{
    /* With n = (x - mean) rise: of_weight += g n, of_bias += g,
       of_x = rise (g w - mean(g w) - n mean(g w n)). */
    int64_t whole = width - width % ROW_LANES, i;
    float mean = moments[0], rise = moments[1];
    row_lanes sums = {0}, products = {0};
    for (i = 0; i < whole; i += ROW_LANES) {
        row_lanes slope = load(g + i), n = (load(x + i) - mean) * rise, scaled = slope * load(weight + i);
        store(of_weight + i, load(of_weight + i) + slope * n);
        store(of_bias + i, load(of_bias + i) + slope);
        sums += scaled;
        products += scaled * n;
    }
    float sum = sum_lanes(sums), product = sum_lanes(products);
    for (; i < width; i++) {
        float n = (x[i] - mean) * rise, scaled = g[i] * weight[i];
        of_weight[i] += g[i] * n;
        of_bias[i] += g[i];
        sum += scaled;
        product += scaled * n;
    }
    sum /= (float)width;
    product /= (float)width;
    for (i = 0; i < width; i++) of_x[i] = rise * (g[i] * weight[i] - sum - (x[i] - mean) * rise * product);
}

void layer_norm_backward(const float *g, const float *x, const float *weights, const float *moments, float *of_x,
                         float *parts, float *of_weights, float *of_biases, int64_t samples, int64_t tokens,
                         int64_t width, int threads)
{
    /* ``parts`` has the sums of the tokens of a chunk: (samples, chunks, 2, width). */
    int64_t chunks = (tokens + CHUNK - 1) / CHUNK;
    #pragma omp parallel num_threads(threads) if (WORTH_WAKING(samples * tokens * width))
    {
        #pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < samples * chunks; chunk++) {
            int64_t sample = chunk / chunks, first = chunk % chunks * CHUNK, last = smaller(first + CHUNK, tokens);
            float *part = parts + 2 * chunk * width;
            memset(part, 0, 2 * width * sizeof(float));
            for (int64_t row = sample * tokens + first; row < sample * tokens + last; row++)
                pull_back_row(g + row * width, x + row * width, weights + sample * width, moments + 2 * row,
                              of_x + row * width, part, part + width, width);
        }
        #pragma omp for schedule(static)
        for (int64_t sample = 0; sample < samples; sample++) {
            float *of_weight = of_weights + sample * width, *of_bias = of_biases + sample * width;
            memset(of_weight, 0, width * sizeof(float));
            memset(of_bias, 0, width * sizeof(float));
            for (int64_t chunk = sample * chunks; chunk < (sample + 1) * chunks; chunk++)
                for (int64_t i = 0; i < width; i++) {
                    of_weight[i] += parts[2 * chunk * width + i];
                    of_bias[i] += parts[(2 * chunk + 1) * width + i];
                }
        }
    }
}

/* ---- normal values from 64 bits, by Wichura's AS 241; see normal.py ------------------------------------------- */

static inline double natural_log(double x)
{
    /* x = 2^e (1 + f) with 1 + f between 1/sqrt(2) and sqrt(2); s = f / (2 + f), log(1 + f) = 2 artanh(s). */
    int64_t bits;
    memcpy(&bits, &x, 8);
    int64_t above = bits - 0x3fe6a09e667f3bcdLL; /* of 1/sqrt(2) */
    double e = (double)(above >> 52);
    bits -= above & (int64_t)0xfff0000000000000LL;
    double mantissa;
    memcpy(&mantissa, &bits, 8);
    double f = mantissa - 1.0, s = f / (2.0 + f), z = s * s;
    double R = 1.0 / 21;
    R = fma(R, z, 1.0 / 19);
    R = fma(R, z, 1.0 / 17);
    R = fma(R, z, 1.0 / 15);
    R = fma(R, z, 1.0 / 13);
    R = fma(R, z, 1.0 / 11);
    R = fma(R, z, 1.0 / 9);
    R = fma(R, z, 1.0 / 7);
    R = fma(R, z, 1.0 / 5);
    R = fma(R, z, 1.0 / 3) * z;
    /* 2 s (1 + R) = f - s (f - 2 R), since 2 s = f - s f. log(2) in two parts: e times the first is exact. */
    double low = fma(s, fma(-2.0, R, f), -e * 1.90821492927058770002e-10);
    return fma(e, 6.93147180369123816490e-01, f - low);
}

static const double A[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
    1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4,
    2.5090809287301226727e3};
static const double B[8] = {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3};
static const double C[8] = {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
    3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2,
    7.74545014278341407640e-4};
static const double D[8] = {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9};

static inline double polynomial(const double *c, double x)
{
    double value = c[7];
    for (int k = 6; k >= 0; k--) value = fma(value, x, c[k]);
    return value;
}

static const double E[8] = {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
    2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5,
    2.01033439929228813265e-7};
static const double F[8] = {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
    7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15};

static void quantile_block(const double *p, double *out, int64_t n)
{
    /* At most BLOCK elements. */
    int64_t tails = 0, far = 0, place[BLOCK];
    double tail[BLOCK];
    for (int64_t i = 0; i < n; i++) {
        double q = p[i] - 0.5, r = fma(-q, q, 0.180625);
        out[i] = q * (polynomial(A, r) / polynomial(B, r));
    }
    for (int64_t i = 0; i < n; i++) { /* the tails side by side: they need a logarithm, and are one in seven */
        place[tails] = i;
        tails += p[i] < 0.075;
    }
    for (int64_t k = 0; k < tails; k++) tail[k] = p[place[k]];
    for (int64_t k = 0; k < tails; k++) {
        double root = sqrt(-natural_log(tail[k])), t = root - 1.6;
        far |= root > 5.0;
        tail[k] = root <= 5.0 ? -polynomial(C, t) / polynomial(D, t) : root;
    }
    if (far) /* seldom: one by one */
        for (int64_t k = 0; k < tails; k++) {
            double t = tail[k] - 5.0;
            if (t > 0.0) tail[k] = -polynomial(E, t) / polynomial(F, t);
        }
    for (int64_t k = 0; k < tails; k++) out[place[k]] = tail[k];
}

void lower_quantile(const double *p, double *out, int64_t size, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (WORTH_WAKING(size))
    for (int64_t first = 0; first < size; first += BLOCK)
        quantile_block(p + first, out + first, smaller(BLOCK, size - first));
}

static void normal_block(const int64_t *bits, double *out, int64_t n)
{
    /* At most BLOCK elements. Rare values are left as NaN with their sign and bits. bits and out may be the same. */
    double p[BLOCK], z[BLOCK];
    for (int64_t i = 0; i < n; i++) p[i] = fma((double)(bits[i] & INT64_MAX), 0x1p-64, 0x1p-65);
    quantile_block(p, z, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t sign = bits[i] & INT64_MIN, tail = bits[i] & INT64_MAX, value;
        memcpy(&value, z + i, 8);
        value = sign | (tail < RARE ? MARKED_NAN | tail : value & INT64_MAX);
        memcpy(out + i, &value, 8);
    }
}

void normal_from_bits(const int64_t *bits, double *out, int64_t size, int threads)
{
    #pragma omp parallel for schedule(static) num_threads(threads) if (WORTH_WAKING(size))
    for (int64_t first = 0; first < size; first += BLOCK)
        normal_block(bits + first, out + first, smaller(BLOCK, size - first));
}

/* ---- ChaCha20, for many blocks side by side; see chacha20.py ------------------------------------------------------- */

#define LANES 16
#define ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define QUARTER(a, b, c, d)                                                   \
    a += b; d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 12);             \
    a += b; d = ROTATE(d ^ a, 8); c += d; b = ROTATE(b ^ c, 7);

typedef uint32_t lanes __attribute__((vector_size(4 * LANES))); /* one word of the states of many blocks */

static const uint32_t CONSTANTS[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574}; /* "expand 32-byte k" */

static void chacha20(lanes *x)
{
    lanes v[16];
    memcpy(v, x, sizeof v);
    for (int round = 0; round < 10; round++) {
        QUARTER(v[0], v[4], v[8], v[12]) QUARTER(v[1], v[5], v[9], v[13])
        QUARTER(v[2], v[6], v[10], v[14]) QUARTER(v[3], v[7], v[11], v[15])
        QUARTER(v[0], v[5], v[10], v[15]) QUARTER(v[1], v[6], v[11], v[12])
        QUARTER(v[2], v[7], v[8], v[13]) QUARTER(v[3], v[4], v[9], v[14])
    }
    for (int word = 0; word < 16; word++) x[word] += v[word];
}

static void start(lanes *x, const int64_t *key)
{
    for (int word = 0; word < 4; word++) x[word] = CONSTANTS[word] - (lanes){0};
    for (int word = 0; word < 8; word++) x[4 + word] = (uint32_t)key[word] - (lanes){0};
    for (int word = 12; word < 16; word++) x[word] = (lanes){0};
}

void child_keys(const int64_t *key, const int64_t *nonces, int64_t *out, int64_t size, int threads)
{
    (void)threads;
    for (int64_t first = 0; first < size; first += LANES) {
        int64_t n = smaller(LANES, size - first);
        lanes x[16];
        start(x, key);
        for (int64_t k = 0; k < n; k++)
            for (int word = 0; word < 3; word++) x[13 + word][k] = (uint32_t)nonces[3 * (first + k) + word];
        chacha20(x);
        for (int64_t k = 0; k < n; k++)
            for (int word = 0; word < 8; word++) out[8 * (first + k) + word] = x[word][k];
    }
}

static void draw_block(const int64_t *key, uint32_t counter, double *out, int64_t n)
{
    int64_t bits[BLOCK];
    for (int64_t first = 0; first < n; first += 8 * LANES, counter += LANES) {
        lanes x[16];
        start(x, key);
        for (int k = 0; k < LANES; k++) x[12][k] = counter + k;
        chacha20(x);
        for (int k = 0; k < LANES; k++)
            for (int i = 0; i < 8; i++)
                bits[first + 8 * k + i] = (int64_t)(x[2 * i][k] | (uint64_t)x[2 * i + 1][k] << 32);
    }
    normal_block(bits, out, n);
}

void normals(const int64_t *keys, const int64_t *sizes, double *out, int64_t leaves, int threads)
{
    int64_t all = 0;
    for (int64_t leaf = 0; leaf < leaves; leaf++) all += sizes[leaf];
    #pragma omp parallel num_threads(threads) if (WORTH_WAKING(all))
    {
        double *own = out;
        for (int64_t leaf = 0; leaf < leaves; own += sizes[leaf++]) {
            #pragma omp for schedule(static) nowait
            for (int64_t first = 0; first < sizes[leaf]; first += BLOCK)
                draw_block(keys + 8 * leaf, (uint32_t)(first / 8), own + first, smaller(BLOCK, sizes[leaf] - first));
        }
    }
}

/* ---- noise on a grid: out = grid round(scale z + value / grid); see fdp/privacy/noise.py --------------------------- */

static void add_block(double *z, const double *value, const double *numbers, int64_t n)
{
    double scale = numbers[0], units = numbers[1], grid = numbers[2];
    for (int64_t i = 0; i < n; i++) z[i] = rint(z[i] * scale + value[i] * units) * grid;
}

void add_on_grid(double *z, const int64_t *addresses, const int64_t *sizes, const double *numbers, int64_t leaves,
                 int threads)
{
    /* In place; z holds all leaves, one after the other, addresses says where the values of each are. numbers: scale,
       1 / grid, grid; the last two are powers of two, so that only the sum is rounded. */
    int64_t all = 0;
    for (int64_t leaf = 0; leaf < leaves; leaf++) all += sizes[leaf];
    #pragma omp parallel num_threads(threads) if (WORTH_WAKING(all))
    {
        double *own = z;
        for (int64_t leaf = 0; leaf < leaves; own += sizes[leaf++]) {
            const double *value = (const double *)addresses[leaf];
            #pragma omp for schedule(static) nowait
            for (int64_t first = 0; first < sizes[leaf]; first += COLUMNS)
                add_block(own + first, value + first, numbers, smaller(COLUMNS, sizes[leaf] - first));
        }
    }
}

/* ---- AdamW, and the parameters after it; see fdp/cpu/adamw.py ----------------------------------------------------- */

static void adamw_block(const float *p, const float *g, const float *m, const float *v, float *restrict new_p,
                        float *restrict new_m, float *restrict new_v, const float *numbers, int64_t n)
{
    float rise_m = numbers[0], rise_v = numbers[1], unbias_m = numbers[2], unbias_v = numbers[3];
    float noise = numbers[4], floor = numbers[5], eps = numbers[6], decay = numbers[7], rate = numbers[8];
    for (int64_t i = 0; i < n; i++) {
        float square = g[i] * g[i], gap_m = g[i] - m[i], gap_v = square - v[i];
        float mean = rise_m < 0.5f ? m[i] + rise_m * gap_m : g[i] - (1.0f - rise_m) * gap_m;
        float second = rise_v < 0.5f ? v[i] + rise_v * gap_v : square - (1.0f - rise_v) * gap_v;
        float moment = second * unbias_v - noise;
        moment = moment < floor ? floor : moment;
        new_m[i] = mean;
        new_v[i] = second;
        new_p[i] = p[i] - rate * (mean * unbias_m / (sqrtf(moment) + eps) + decay * p[i]);
    }
}

static void update_block(const int64_t *addresses, int64_t first, const float *numbers, int64_t n)
{
    float *of[7];
    for (int i = 0; i < 7; i++) of[i] = (float *)addresses[i] + first;
    adamw_block(of[0], of[1], of[2], of[3], of[4], of[5], of[6], numbers, n);
}

void adamw(const int64_t *addresses, const int64_t *sizes, const float *numbers, int64_t leaves, int threads)
{
    /* addresses: of p, g, m and v, which are read, and of the new p, m and v, for every leaf. */
    int64_t all = 0;
    for (int64_t leaf = 0; leaf < leaves; leaf++) all += sizes[leaf];
    #pragma omp parallel num_threads(threads) if (WORTH_WAKING(all))
    for (int64_t leaf = 0; leaf < leaves; leaf++) {
        #pragma omp for schedule(static) nowait
        for (int64_t first = 0; first < sizes[leaf]; first += COLUMNS)
            update_block(addresses + 7 * leaf, first, numbers, smaller(COLUMNS, sizes[leaf] - first));
    }
}
